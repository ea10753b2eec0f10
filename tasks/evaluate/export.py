"""`dpn export`: a run's classifier for use elsewhere, with a model card, checked against the original's outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpn_cli.classifier import Classifier, load_classifier, readable, save_classifier
from dpn_cli.convert import PROOF_IMAGES, PROOF_SEED, TOLERANCE
from dpn_cli.errors import DpnError
from dpn_cli.files import replace_file, replace_text

Kind = Literal["safetensors", "pt2", "onnx"]
FILES: dict[Kind, str] = {"safetensors": "model.safetensors", "pt2": "model.pt2", "onnx": "model.onnx"}
# Another runtime's kernels add up in another order.
ONNX_TOLERANCE = 1e-4


class _Deployed(nn.Module):
    """Pixels in [0, 1], (b, 3, h, w), to logits (b, classes): the normalisation is inside."""

    mean: Tensor
    std: Tensor

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.network = classifier.model
        self.register_buffer("mean", classifier.model.input_mean.clone())
        self.register_buffer("std", classifier.model.input_std.clone())

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.network((pixels - self.mean) / self.std)
        return logits


def export(place: str, folder: Path, kind: Kind) -> dict[str, Any]:
    """Write a classifier as `kind` with a model card into `folder`; returns what was written and how exact.

    Raises `DpnError` when the written network gives other outputs (it is not kept then) or a library is missing.
    """
    classifier = load_classifier(place)
    classifier.model.eval()
    deployed = _Deployed(classifier).eval()
    size = classifier.model.config.image_size
    pixels = torch.rand(PROOF_IMAGES, 3, *size, generator=torch.Generator().manual_seed(PROOF_SEED))
    with torch.no_grad():
        expected = deployed(pixels)
    allowed, difference = ONNX_TOLERANCE if kind == "onnx" else TOLERANCE, 0.0
    write, read = {"safetensors": _safetensors, "pt2": _pt2, "onnx": _onnx}[kind](classifier, deployed, pixels)

    def proven(temporary: Path) -> None:
        nonlocal difference
        write(temporary)
        difference = float((read(temporary, pixels) - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        if not difference <= allowed:
            raise DpnError(
                f"{folder / FILES[kind]}: not written: outputs differ by {difference:.1e} (relative), "
                f"more than {allowed:.0e}"
            )

    digest = replace_file(folder / FILES[kind], proven)
    replace_text(folder / "README.md", model_card(classifier, kind, digest))
    return {
        "path": str(folder / FILES[kind]),
        "card": str(folder / "README.md"),
        "digest": digest,
        "images": PROOF_IMAGES,
        "difference": difference,
    }


Pair = tuple[Callable[[Path], Any], Callable[[Path, Tensor], Tensor]]


def _safetensors(classifier: Classifier, deployed: nn.Module, pixels: Tensor) -> Pair:
    def read(path: Path, images: Tensor) -> Tensor:
        with torch.no_grad():
            outputs: Tensor = _Deployed(load_classifier(str(path))).eval()(images)
        return outputs

    return lambda path: save_classifier(classifier, path), read


def _pt2(classifier: Classifier, deployed: nn.Module, pixels: Tensor) -> Pair:
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(deployed, (pixels,), dynamic_shapes=({0: batch},))

    def read(path: Path, images: Tensor) -> Tensor:
        with path.open("rb") as file, torch.no_grad():
            outputs: Tensor = torch.export.load(file).module()(images)
        return outputs

    def write(path: Path) -> None:
        with path.open("wb") as file:
            torch.export.save(program, file)

    return write, read


def _onnx(classifier: Classifier, deployed: nn.Module, pixels: Tensor) -> Pair:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise DpnError(f"--to onnx: {error.name} is not installed; pip install 'dpn-cli[onnx]'") from error

    def write(path: Path) -> None:
        batch = torch.export.Dim("batch", min=1, max=4096)
        program = torch.onnx.export(
            deployed, (pixels,), dynamo=True, input_names=["pixels"], output_names=["logits"],
            dynamic_shapes=({0: batch},), verbose=False,
        )  # fmt: skip
        assert program is not None
        program.save(path, external_data=False)

    def read(path: Path, images: Tensor) -> Tensor:
        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(None, {"pixels": images.numpy()})[0])

    return write, read


def model_card(classifier: Classifier, kind: Kind, digest: str) -> str:
    """Return a model card in Markdown: what it is, how it was made, what it scores, how to use it."""
    model, facts = classifier.model, classifier.facts
    config, (height, width) = model.config, model.config.image_size
    scored = facts.get("minival_top1")
    inside = "inside the file" if kind != "safetensors" else f"subtract {list(model.mean)}, divide by {list(model.std)}"
    names = readable(classifier.classes)
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    lines = [
        "---",
        "library_name: dpn",
        "pipeline_tag: image-classification",
        "---",
        f"# {facts.get('arch', 'ViT')} with stem `{config.stem}`, {len(names)} classes",
        "",
        f"- Input: RGB, {height} x {width} pixels. The shorter side is resized to {classifier.resize_side} by area,",
        f"  the centre cut out; values in [0, 1]; normalisation: {inside}.",
        f"- Output: {len(names)} logits; {classifier.loss} gives probabilities.",
        f"- Classes: {shown}",
        f"- Top-1 on minival: {f'{scored:.2f} %' if scored is not None else 'not measured'}",
        f"- Parameters: {model.report.parameters / 1e6:.2f} M, SHA-256 `{digest}`",
        "",
        "## How it was made",
        "",
        "```json",
        json.dumps({"recipe": facts.get("recipe"), "data fingerprints": facts.get("data")}, indent=2),
        "```",
        "",
    ]
    return "\n".join(lines)
