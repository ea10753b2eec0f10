"""`dpn export`: a run's classifier for use elsewhere, with a model card, checked against the original's outputs."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpn_cli.errors import DpnError
from dpn_cli.run.artifact_kinds import digest_in_run, resolve
from dpn_cli.run.files import read_object, replace_file, replace_text
from dpn_cli.statistics import format_accuracy
from dpn_cli.weights.convert import PROOF_IMAGES, PROOF_SEED, TOLERANCE
from tasks.classify.classifier import Classifier, imagenet_classes, load_classifier, readable, save_classifier

Kind = Literal["safetensors", "pt2", "onnx"]
FILES: dict[Kind, str] = {"safetensors": "model.safetensors", "pt2": "model.pt2", "onnx": "model.onnx"}
# Another runtime's kernels add up in another order.
ONNX_TOLERANCE = 1e-4
# The network is traced with the first of these batch sizes and has to give the same outputs with all of them.
BATCHES = (PROOF_IMAGES, 1, PROOF_IMAGES + 3)
MOST_IMAGES = 4096  # at a time, that pt2 and onnx allow


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


def export(location: str, folder: Path, kind: Kind) -> dict[str, Any]:
    """Write a classifier as `kind` with a model card into `folder`; return paths, digest and error.

    Raises `DpnError` when the written network gives other outputs (it is not kept then) or a library is missing.
    """
    classifier = load_classifier(location, command="dpn export")
    classifier.model.eval()
    deployed = _Deployed(classifier).eval()
    size = classifier.model.config.image_size
    pixels = torch.rand(max(BATCHES), 3, *size, generator=torch.Generator().manual_seed(PROOF_SEED))
    with torch.no_grad():
        expected = deployed(pixels)
    allowed, difference = ONNX_TOLERANCE if kind == "onnx" else TOLERANCE, 0.0
    with _silence_exporters():
        write, read = {"safetensors": _safetensors, "pt2": _pt2, "onnx": _onnx}[kind](
            classifier, deployed, pixels[: BATCHES[0]]
        )

    def write_checked(temporary: Path) -> None:
        nonlocal difference
        with _silence_exporters():
            write(temporary)
            run = read(temporary)
        worst = [(_try(run, pixels[:n], folder / FILES[kind]) - expected[:n]).abs().max() for n in BATCHES]
        difference = float(torch.stack(worst).max() / expected.abs().max().clamp(min=1e-30))
        if not difference <= allowed:
            raise DpnError(
                f"{folder / FILES[kind]}: not written: outputs differ by {difference:.1e} (relative), "
                f"more than {allowed:.0e}"
            )

    digest = replace_file(folder / FILES[kind], write_checked)
    replace_text(folder / "README.md", model_card(classifier, kind, digest, _read_result(location)))
    return {
        "path": str(folder / FILES[kind]),
        "card": str(folder / "README.md"),
        "digest": digest,
        "images": max(BATCHES),
        "batches": list(BATCHES),
        "difference": difference,
    }


Outputs = Callable[[Tensor], Tensor]


@contextmanager
def _silence_exporters() -> Iterator[None]:
    """Silence torch's exporters, which warn of their internals and print them (torch 2.11)."""
    with warnings.catch_warnings(action="ignore"), redirect_stdout(io.StringIO()):
        yield


@torch.no_grad()
def _try(run: Outputs, pixels: Tensor, path: Path) -> Tensor:
    """Run the written network on a batch. Raises `DpnError` when it fails."""
    try:
        return run(pixels)
    except Exception as error:  # every runtime has its own kinds
        reason = " ".join(str(error).split())[:160]
        raise DpnError(f"{path}: not written: it fails on a batch of {len(pixels)} images ({reason})") from error


Pair = tuple[Callable[[Path], Any], Callable[[Path], Outputs]]


def _safetensors(classifier: Classifier, deployed: nn.Module, pixels: Tensor) -> Pair:
    return lambda path: save_classifier(classifier, path), lambda path: _Deployed(load_classifier(str(path))).eval()


def _pt2(classifier: Classifier, deployed: nn.Module, pixels: Tensor) -> Pair:
    batch = torch.export.Dim("batch", min=1, max=MOST_IMAGES)
    program = torch.export.export(deployed, (pixels,), dynamic_shapes=({0: batch},))

    def read(path: Path) -> Outputs:
        with path.open("rb") as file:
            return torch.export.load(file).module()

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
        batch = torch.export.Dim("batch", min=1, max=MOST_IMAGES)
        program = torch.onnx.export(
            deployed, (pixels,), dynamo=True, input_names=["pixels"], output_names=["logits"],
            dynamic_shapes=({0: batch},), verbose=False,
        )  # fmt: skip
        assert program is not None
        program.save(path, external_data=False)

    def read(path: Path) -> Outputs:
        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        return lambda images: torch.from_numpy(session.run(None, {"pixels": images.numpy()})[0])

    return write, read


def model_card(classifier: Classifier, kind: Kind, digest: str, result: Mapping[str, Any] | None = None) -> str:
    """Return a model card in Markdown: the network, its use, its scores and its training.

    `result` is that of the run, which has the score on the validation images.
    """
    model, facts = classifier.model, classifier.facts
    vit_config, (height, width) = model.config, model.config.image_size
    normalization = (
        "inside the file" if kind != "safetensors" else f"subtract {list(model.mean)}, divide by {list(model.std)}"
    )
    names = readable(classifier.classes)
    config = facts.get("config")
    if config and classifier.classes != imagenet_classes(1000):
        # A config's heading names ImageNet's published numbers, which do not hold for other classes.
        config = {key: value for key, value in config.items() if key != "about"}
    class_list = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    lines = [
        "---",
        "library_name: dpn",
        "pipeline_tag: image-classification",
        "---",
        f"# {facts.get('arch', 'ViT')} with stem `{vit_config.stem}`, {len(names)} classes",
        "",
        f"- Input: RGB, {height} x {width} pixels: {classifier.preparation},",
        f"  fractions of a grey level dropped; values in [0, 1]; normalisation: {normalization}.",
        f"- Output: {len(names)} logits; {classifier.loss} gives probabilities.",
        f"- Classes: {class_list}",
        *(
            _describe_distillation(facts["distilled"])
            if "distilled" in facts
            else _describe_scores(facts, result or {})
        ),
        f"- Parameters: {model.report.parameters / 1e6:.2f} M; SHA-256 of the file `{digest}`",
        "",
        "## How it was made",
        "",
        "```json",
        json.dumps({"config": config, "data fingerprints": facts.get("data")}, indent=2),
        "```",
        "",
    ]
    return "\n".join(lines)


def _describe_distillation(facts: Mapping[str, Any]) -> list[str]:
    """Return the card's lines of the teacher, the images and the agreement with the teacher."""
    teacher = facts["teacher"]
    return [
        f"- Distilled from {teacher['source']} ({teacher['arch']}, stem `{teacher['stem']}`, at "
        f"{teacher['image_size'][0]} x {teacher['image_size'][1]} pixels, SHA-256 of the file `{teacher['digest']}`), "
        f"start {facts['start']}, with images whose labels were not used (fingerprint {facts['data']['train']}).",
        f"- On {facts['images']} held-out images: names the same class as its teacher on {facts['agreement']:.2f} %, "
        f"Kullback-Leibler divergence {facts['kl']:.4g} nats, share of the token variance {_share(facts)}.",
    ]


def _read_result(location: str) -> dict[str, Any] | None:
    """Return the result of the run whose weights are exported; None for weights without a run."""
    weights = Path(resolve(location, "dpn export")).expanduser()
    return read_object(weights.parent / "result.json") if digest_in_run(weights) else None


def _describe_scores(facts: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Return the card's lines of the accuracies on the validation images and on those that chose the checkpoint."""
    images = result.get("images")
    if not isinstance(images, Mapping) or result.get("top1") is None:
        minival = facts.get("minival_top1")
        chosen = "not measured" if minival is None else f"{minival:.2f} %"
        return [f"- Top-1 on the images that chose the checkpoint (minival): {chosen}; not a score of this network."]
    lines = [f"- Top-1: {format_accuracy(result['top1'], images['val'], 'validation images')}."]
    if result.get("minival_top1") is not None and images.get("minival"):
        accuracy = format_accuracy(result["minival_top1"], images["minival"])
        lines.append(f"- Top-1 on the images that chose the checkpoint (minival): {accuracy}.")
    return lines


def _share(facts: Mapping[str, Any]) -> str:
    value = facts["token_variance"]
    return "not comparable" if value is None else f"{value:.4f}"
