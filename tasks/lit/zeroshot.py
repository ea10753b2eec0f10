"""Zero-shot classification: class names in prompts, one unit feature per class, the nearest class wins.

As big_vision's discriminative_classifier: the text is canonicalised, prompts are averaged and normalised again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.tokenizer import canonicalize_text
from safetensors import SafetensorError
from torch import Tensor

from dpn_cli.data.sources.base import LabelledImages
from dpn_cli.errors import DataError, SaveError
from dpn_cli.metrics import Scores, score
from dpn_cli.run import signals
from dpn_cli.run.console import OnProgress, ignore_progress
from dpn_cli.run.distributed import World
from dpn_cli.run.files import read_named
from dpn_cli.weights.safetensors_io import read_weights, write_weights
from tasks.lit.data import DEMO_SPLITS
from tasks.lit.features import digest_of
from tasks.lit.page_samples import NearestImages
from tasks.lit.towers import Towers

CLASSES = 64  # classes whose prompts go through the text tower between two looks for a stop signal
DEMO_PROMPTS = 32


@cache
def prompt_set(name: str) -> tuple[str, ...]:
    """Return the templates of ``clip_paper`` (81), ``clip_best`` (8), ``plain``, ``demo``, or of a file, one a line.

    Raises `DataError` for another name, and for a template without ``{}``.
    """
    from open_clip.zero_shot_metadata import OPENAI_IMAGENET_TEMPLATES, SIMPLE_IMAGENET_TEMPLATES

    prompt_sets = {"clip_paper": OPENAI_IMAGENET_TEMPLATES, "clip_best": SIMPLE_IMAGENET_TEMPLATES, "plain": ()}
    if name in prompt_sets:  # big_vision adds the bare name to both of CLIP's lists
        return (*(template("{}") for template in prompt_sets[name]), "{}")
    if name == "demo":
        return _demo_prompts()
    lines = _lines(
        name, f"--prompts {name}", f"choose {', '.join(prompt_sets)}, demo, or a file with a template a line"
    )
    incomplete_lines = [line for line in lines if "{}" not in line]
    if incomplete_lines:
        raise DataError(f"--prompts {name}: {incomplete_lines[0]!r} has no {{}} for the class name")
    return tuple(lines)


def _demo_prompts() -> tuple[str, ...]:
    """Return sentences as the built-in scenes have them, with a blank for the object."""
    from dpn_cli.data.sources import synthetic

    names: dict[str, None] = {}
    for number in range(DEMO_SPLITS["train"][1]):
        scene = synthetic.demo_scene(number)
        main = scene.objects[0]
        names[synthetic.caption(scene).replace(f"{main.color} {main.shape}", "{}", 1)] = None
        if len(names) == DEMO_PROMPTS:
            break
    return tuple(names)


def _lines(file: str, option: str, way_out: str) -> list[str]:
    content = read_named(Path(file).expanduser(), option, way_out)
    try:
        text = content.decode("utf-8-sig")  # editors put a mark before it
    except UnicodeDecodeError as error:
        raise DataError(f"{option}: not text in UTF-8 ({error.reason} at byte {error.start}); {way_out}") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{option}: an empty file; {way_out}")
    return lines


def class_names(folders: Sequence[str], names_file: str | None) -> tuple[list[str], str]:
    """Return a name per class for prompts, and where the names come from.

    `folders` are the data set's own names; those of ImageNet (wnids, or the numbers 0 to 999) get open_clip's names.
    `named` is ``imagenet``, or a file with one name per line in the order of the classes; of several names (``a, b``)
    the first is taken. Raises `DataError` when that is another number of names.
    """
    if names_file is not None and names_file != "imagenet":
        names = _lines(names_file, f"--class-names {names_file}", "pass imagenet, or a file with a name a line")
        if len(names) != len(folders):
            raise DataError(f"--class-names {names_file}: {len(names)} names for the {len(folders)} classes of --data")
        return [name.split(",")[0] for name in names], names_file
    from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES
    from timm.data import ImageNetInfo

    index_of = {name: index for index, name in enumerate(ImageNetInfo("imagenet-1k").label_names())}
    if len(folders) == len(index_of) and all(name.isdecimal() for name in folders):
        index_of = {str(index): index for index in range(len(index_of))}
    if all(name in index_of for name in folders):
        return [IMAGENET_CLASSNAMES[index_of[name]] for name in folders], "open_clip's ImageNet names"
    if names_file == "imagenet":
        unknown = next(name for name in folders if name not in index_of)
        raise DataError(f"--class-names imagenet: {unknown!r} is not an ImageNet class folder")
    words = [name.encode("utf-8", "replace").decode() for name in folders]  # a folder's name may not be UTF-8
    return [name.replace("_", " ").split(",")[0] for name in words], "the names of --data's classes"


def prompts_of(names: Sequence[str], templates: Sequence[str]) -> list[list[str]]:
    """Return for every class its prompts, canonicalised."""
    return [[canonicalize_text(template.replace("{}", name)) for template in templates] for name in names]


def build_classifier(towers: Towers, names: Sequence[str], templates: Sequence[str]) -> Tensor:
    """Return one unit feature per class (classes, d): the mean over its prompts' unit features, normalised again.

    Our own: open_clip's `build_zero_shot_classifier` returns the same, but passes all prompts of a part through the
    text tower at once and does not heed stop signals.
    """
    weights = []
    for start in range(0, len(names), CLASSES):
        signals.check_here()
        prompts = prompts_of(names[start : start + CLASSES], templates)
        features = towers.encode_texts([text for texts in prompts for text in texts])
        weights.append(F.normalize(features.reshape(len(prompts), len(templates), -1).mean(1), dim=-1))
    return torch.cat(weights)


def classifier_of(
    towers: Towers, names: Sequence[str], templates: Sequence[str], cache_folder: Path | None, world: World
) -> Tensor:
    """Return the classifier, from the folder `kept` where it was built before of the same tower, names and prompts."""
    if cache_folder is None:
        return build_classifier(towers, names, templates)
    device = towers.text.log_temperature.device
    bf16 = torch.is_autocast_enabled(device.type)
    facts = json.dumps([digest_of(towers.text), towers.tokenizer.to_dict(), list(names), list(templates), bf16])
    path = cache_folder / f"zeroshot-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.safetensors"
    try:
        return read_weights(path)[0]["classes"].to(device)
    except (OSError, SafetensorError, DataError, KeyError):
        weights = build_classifier(towers, names, templates)
    if world.leads:
        with contextlib.suppress(SaveError):  # a read-only run is scored as well
            write_weights(path, {"classes": weights}, {})
    return weights


def classify(
    towers: Towers,
    weights: Tensor,
    split: LabelledImages,
    world: World,
    *,
    workers: Any,
    batch_size: int,
    skip_bad: bool,
    nearest: NearestImages,
    on_progress: OnProgress = ignore_progress,
) -> Scores:
    """Score the nearest class of every image of a split; `nearest` sees the images, `done` is that of `score`."""
    scale = towers.text.log_temperature.exp().detach()

    def logits(images: Tensor) -> Tensor:
        features = towers.encode_images(images)
        with torch.autocast(features.device.type, enabled=False):  # cosines in bfloat16 would tie
            return scale * (features @ weights.T)

    return score(
        logits,
        split,
        towers.prepare,
        len(weights),
        world,
        loss="softmax",
        batch_size=batch_size,
        workers=workers,
        skip_bad=skip_bad,
        on_progress=on_progress,
        see=lambda rows, logits: nearest.see(rows, logits / scale),
    )


def check_order(scores: Scores, classes: int) -> None:
    """Refuse an accuracy that is not above chance: names in another order than the labels look like that.

    Of a good network and a permutation of the names about one class in all keeps its own. Raises `DataError`.
    """
    chance = 100 / classes
    if scores.top1 <= chance + 100 * 2 * math.sqrt((1 - 1 / classes) / classes / scores.images):
        raise DataError(
            f"zero-shot accuracy {scores.top1:.2f} % is not above chance ({chance:.2f} % of {classes} classes, "
            f"{scores.images} images): the class names are probably in another order than the labels (--class-names), "
            "or the towers know nothing of these classes; --force prints the number anyway"
        )
