"""`dpn lit predict`, `search` and `export`: images to labels, a sentence to images, towers for elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from open_clip.tokenizer import canonicalize_text

from dpn_cli.arch import STEMS
from dpn_cli.config.schema import PredictionFiles
from dpn_cli.data.decode import ReadOptions
from dpn_cli.data.resize import resize
from dpn_cli.data.sources.folder import find_image_files
from dpn_cli.engine import fit as engine
from dpn_cli.errors import DataError, DpnError, ImageError
from dpn_cli.report.content import Cell, Gallery, PageImage, PageSection, Table
from dpn_cli.report.predictions import Predictions, tally, thumbnails, write_gallery
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import join, refuse_ranks
from dpn_cli.run.files import replace_json, replace_text
from dpn_cli.weights.convert import PROOF_IMAGES, PROOF_SEED
from tasks.lit.cache import problem_of
from tasks.lit.captions import CaptionedFiles
from tasks.lit.encode import cache_root, encoded, image_encoder
from tasks.lit.options import SearchOptions, ZeroShotOptions
from tasks.lit.towers import WEIGHTS, Towers, describe_towers, load_towers, save_towers
from tasks.lit.zeroshot import build_classifier, prompt_set

Json = dict[str, Any]
# Labels below a thumbnail.
MOST_LINES = 3


def label(options: ZeroShotOptions, console: Console) -> Predictions:
    """Return for every image its best labels with cosine and probability.

    Without ``--decode`` JPEGs are decoded as they were for the training. Unreadable images are named and left out.
    Raises `DpnError` without labels, and `DataError` where no image is readable.
    """
    names = [name.strip() for name in options.labels.split(",") if canonicalize_text(name)]
    if not names:
        raise DpnError('--labels: no label in it; write them with commas, e.g. --labels "a red circle,a blue square"')
    how, runtime = options.reading, options.runtime
    with signals.listen(signals.NO_RESULT), join(runtime.device) as world:
        refuse_ranks(world, "lit predict")
        towers = load_towers(options.run, "dpn lit predict").to(world.device)
        found = Predictions(find_image_files(options.images), options.written, console)
        reading = ReadOptions(how.decode or towers.decoder, how.max_pixels)
        autocast = engine.precision_of(runtime, world.device)
        with autocast:
            classes = build_classifier(towers, names, prompt_set(options.prompts))
        resized = partial(resize, size=towers.image.config.image_size)
        batches = found.read(
            reading, resized, batch_size=options.batch_size, workers=runtime.workers, label="lit predict"
        )
        with closing(batches):
            for part in batches:
                with autocast:
                    features = towers.encode_images(torch.stack([one.prepared for one in part]))
                cosine = features @ classes.T
                chances = towers.probabilities(cosine)
                best = cosine.topk(min(options.top, len(names)), dim=-1).indices
                for one, row, values, chance in zip(
                    part, best.tolist(), cosine.tolist(), chances.tolist(), strict=True
                ):
                    labels = [{"label": names[i], "cosine": values[i], "probability": chance[i]} for i in row]
                    found.add({"image": str(one.path), "labels": labels}, one.small)
        predicted = tally("What was predicted", "label", (result["labels"][0]["label"] for result in found.results))
        found.write("dpn lit predict", options.run, [predicted], _lines)
    return found


def _lines(result: Json) -> Sequence[str]:
    labels = [f"{one['label']} {one['probability']:.1%}, cosine {one['cosine']:+.3f}" for one in result["labels"]]
    return [*labels[:MOST_LINES], result["image"]]


def search(options: SearchOptions, console: Console) -> Predictions | None:
    """Return the images of a folder that are nearest to a sentence; their features are cached.

    Without ``--decode`` JPEGs are decoded as they were for the training. Unreadable images are named and left out;
    raises `DataError` where that leaves none. None on ranks that do not lead.
    """
    if not canonicalize_text(options.query):
        raise DpnError("--query: an empty sentence")
    how, runtime = options.reading, options.runtime
    with signals.listen(signals.NO_RESULT), join(runtime.device) as world:
        towers = load_towers(options.run, "dpn lit search").to(world.device)
        found = Predictions(find_image_files([options.images]), PredictionFiles(html=options.html), console)
        files = images_in(options.images, found.paths, options.query, found.leave_out)
        found.check_any()
        files.reading = ReadOptions(how.decode or towers.decoder, how.max_pixels)
        encoder = image_encoder(towers.image, runtime, world, skip_bad=True, batch_size=options.batch_size)
        features, good = encoded(files, encoder, cache_root(options.cache_dir), world, console)
        with engine.precision_of(runtime, world.device):
            sentence = build_classifier(towers, [options.query], prompt_set("plain"))
        if not world.leads:
            return None
        for row in sorted(set(range(len(files.keys))) - set(good)):
            found.leave_out(files.path(row), problem_of(files, row))
        cosine = (features.to(world.device) @ sentence.T)[:, 0]
        best = cosine.topk(min(options.top, len(good)))
        found.results += [
            {"image": files.where(good[row]), "cosine": value}
            for row, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        if options.html:
            paths = [files.path(good[row]) for row in best.indices.tolist()]
            shown = list(thumbnails(paths, files.reading, runtime.workers))
            _write_found(options.html, options, found, shown, len(good))
    return found


def _write_found(
    file: Path, options: SearchOptions, found: Predictions, shown: Sequence[tuple[int, bytes]], count: int
) -> None:
    """Write the page of a search among `count` images; `shown` are thumbnails with their places in the results."""
    nearest = found.results
    facts: list[tuple[str, Cell]] = [("query", options.query), ("network", options.run)]
    facts += [("folder", str(options.images)), ("images in it", count)]
    images = [
        PageImage(small, [f"{place + 1}. cosine {nearest[place]['cosine']:.3f}", nearest[place]["image"]])
        for place, small in shown
    ]
    title = f"The {len(images)} nearest images, the nearest first" if len(images) > 1 else "The nearest image"
    said = PageSection("Search", [*found.left_out(), Table("", ("", ""), facts)])
    write_gallery(file, f"dpn lit search: {options.query}", said, Gallery(title, images))


def images_in(
    folder: Path, paths: Sequence[Path], query: str, leave_out: Callable[[Path, DataError], object]
) -> CaptionedFiles:
    """Return images in or below a folder, each with the query as its sentence.

    `leave_out` takes those that are no files (broken links), with what is wrong.
    """
    files = CaptionedFiles(folder)
    for path in paths:
        try:
            files.add(path.relative_to(folder).as_posix(), (query,), str(folder))
        except ImageError as error:
            leave_out(path, error)
    return files


def export(place: str, folder: Path) -> Json:
    """Write towers and tokenizer as ``weights.safetensors`` and ``config.json``, load them again and compare.

    Raises `DpnError` when what was loaded gives other features.
    """
    towers = load_towers(place, "dpn lit export").to(torch.device("cpu"))
    size = towers.image.config.image_size
    images = torch.randint(256, (PROOF_IMAGES, 3, *size), generator=torch.Generator().manual_seed(PROOF_SEED))
    digest = save_towers(towers, folder / WEIGHTS)
    # A hundred thousand characters of digests stay in the weights' file, for 'dpn lit eval' alone.
    shown = {key: value for key, value in towers.facts.items() if key != "trained_on"}
    replace_json(folder / "config.json", {**describe_towers(towers), "facts": shown, "sha256": digest})
    again = load_towers(str(folder)).to(torch.device("cpu"))
    texts = ["a red circle", "two small objects"]
    same = torch.equal(towers.encode_images(images.to(torch.uint8)), again.encode_images(images.to(torch.uint8)))
    if not same or not torch.equal(towers.encode_texts(texts), again.encode_texts(texts)):
        raise DpnError(f"{folder}: loaded again, the towers give other features")
    replace_text(folder / "README.md", model_card(towers, digest))
    return {"path": str(folder / WEIGHTS), "config": str(folder / "config.json"), "digest": digest}


def _stem_lines(towers: Towers) -> list[str]:
    """Say what the stem computes, and in which order a norm with weights of its own reads a patch."""
    stem, norm = towers.image.config.stem, "patch_embed.norm_in.weight"
    if norm not in towers.image.state_dict():
        return [f"- Stem `{stem}`: {STEMS[stem]}."]
    return [
        f"- Stem `{stem}`: {STEMS[stem]}. p is the patch flattened as (row, column, channel): in this order the first "
        f"norm reads it, and `image.{norm}` holds its weights. `image.patch_embed.proj.weight`, which is W, has the "
        "axes (output, channel, row, column); permute it to (output, row, column, channel) before flattening it."
    ]


def model_card(towers: Towers, digest: str) -> str:
    """Return a model card in Markdown: what it is, how it was made, how to use it."""
    facts, (height, width), tokenizer = towers.facts, towers.image.config.image_size, towers.tokenizer
    # A config's heading names the paper's numbers, whose images and captions nobody else has.
    config = {key: value for key, value in facts["config"].items() if key != "about"}
    lines = [
        "---",
        "library_name: dpn",
        "pipeline_tag: zero-shot-image-classification",
        "---",
        f"# LiT: image tower {facts['arch']} with stem `{towers.image.config.stem}`, and a text tower",
        "",
        f"- Images: RGB, resized to {height} x {width} bilinearly without antialiasing, in [0, 1], minus "
        f"{list(towers.image.mean)}, divided by {list(towers.image.std)}.",
        *_stem_lines(towers),
        f"- Texts: {tokenizer.name}, {tokenizer.context} tokens, cleaning `{tokenizer.clean}`, end token kept.",
        f"- Trained on {facts['pairs']['images']} images with {facts['pairs']['captions']} captions, {facts['steps']} "
        f"steps, loss {towers.loss}; the image tower was frozen.",
        f"- sha256 of `{WEIGHTS}`: {digest}",
        "",
        "```python",
        "from tasks.lit.towers import load_towers",
        "",
        'towers = load_towers("FOLDER")',
        "images = towers.encode_images(torch.stack([towers.prepare(pixels)]))  # pixels: (h, w, 3) uint8",
        'texts = towers.encode_texts(["a red circle", "a blue square"])',
        "print(towers.probabilities(images @ texts.T))",
        "```",
        "",
        "The config it was trained with:",
        "",
        "```json",
        json.dumps(config, indent=2),
        "```",
    ]
    return "\n".join(lines) + "\n"
