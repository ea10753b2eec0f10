"""`dpn lit export`: both towers and the tokenizer for use elsewhere, with a model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dpn_cli.arch import STEMS
from dpn_cli.errors import DpnError
from dpn_cli.run.files import replace_json, replace_text
from dpn_cli.weights.convert import PROOF_IMAGES, PROOF_SEED
from tasks.lit.towers import WEIGHTS, Towers, describe_towers, load_lit, save_towers

Json = dict[str, Any]


def export(location: str, folder: Path) -> Json:
    """Write towers and tokenizer as ``weights.safetensors`` and ``config.json``, load them again and compare.

    Raises `DpnError` when what was loaded gives other features.
    """
    towers = load_lit(location, "dpn lit export").to(torch.device("cpu"))
    size = towers.image.config.image_size
    images = torch.randint(256, (PROOF_IMAGES, 3, *size), generator=torch.Generator().manual_seed(PROOF_SEED))
    digest = save_towers(towers, folder / WEIGHTS)
    # A hundred thousand characters of digests stay in the weights' file, for 'dpn lit eval' alone.
    metadata = {key: value for key, value in towers.facts.items() if key != "trained_on"}
    replace_json(folder / "config.json", {**describe_towers(towers), "facts": metadata, "sha256": digest})
    reloaded = load_lit(str(folder)).to(torch.device("cpu"))
    texts = ["a red circle", "two small objects"]
    pixels = images.to(torch.uint8)
    are_equal = torch.equal(towers.encode_images(pixels), reloaded.encode_images(pixels))
    if not are_equal or not torch.equal(towers.encode_texts(texts), reloaded.encode_texts(texts)):
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
        "from tasks.lit.towers import load_lit",
        "",
        'towers = load_lit("FOLDER")',
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
