"""Both towers and the tokenizer in one file, and what can be done with them: encode images, encode texts.

Nothing here needs the parts that train.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from dpn_cli.arch import Size, size_name
from dpn_cli.config.schema import RunImageReading
from dpn_cli.data.decode import Decoder, Pixels, options_of_run
from dpn_cli.data.image_inputs import ImageInput, iter_pixels
from dpn_cli.data.resize import resize
from dpn_cli.engine.memory import in_chunks
from dpn_cli.errors import DataError
from dpn_cli.run import artifact_kinds
from dpn_cli.run.artifact_kinds import WEIGHTS as WEIGHTS
from dpn_cli.run.artifact_kinds import resolve
from dpn_cli.weights.backbone import Backbone, describe_backbone, load_backbone
from dpn_cli.weights.formats import ours
from dpn_cli.weights.formats.state_dict import Contents
from dpn_cli.weights.safetensors_io import read_weights, write_weights
from tasks.lit.text_tower import TextTower
from tasks.lit.tokenizer import Tokenizer

KEY = "lit"
TEXTS = 256  # that go through the tower at once


@dataclass
class Towers:
    """An image tower, the text tower trained against it, and the tokenizer.

    `facts` say how they came about; `decoder` made the pixels of JPEGs. With `exif` images were turned as their EXIF
    orientation says.
    """

    image: Backbone
    text: TextTower
    tokenizer: Tokenizer
    loss: Literal["softmax", "siglip"]
    facts: dict[str, Any]
    decoder: Decoder = "exact"
    exif: bool = False

    def to(self, device: torch.device) -> Towers:
        """Move both towers, and put them into eval mode."""
        self.image.to(device).eval()
        self.text.to(device).eval()
        return self

    def prepare(self, pixels: Pixels) -> Tensor:
        """Resize decoded pixels (h, w, 3) to what the image tower takes: (3, *size) uint8."""
        return resize(pixels, self.image.config.image_size)

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """Return unit features (b, d) in float32 of uint8 images (b, 3, *size)."""
        device = self.image.input_mean.device
        return F.normalize(self.image(self.image.normalize(images.to(device))).float(), dim=-1)

    @torch.no_grad()
    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Return unit features (n, d) in float32."""
        device = self.text.log_temperature.device
        parts = []
        for start in range(0, len(texts), TEXTS):
            tokens, _ = self.tokenizer.encode(texts[start : start + TEXTS])
            parts.append(in_chunks(self.text.encode, torch.from_numpy(tokens).long().to(device)))
        return torch.cat(parts)

    @torch.no_grad()
    def probabilities(self, similarity: Tensor) -> Tensor:
        """Map cosines (b, texts) to probabilities: of each text alone for the siglip loss, else adding up to one."""
        logits = similarity * self.text.log_temperature.exp()
        return logits.softmax(-1) if self.text.bias is None else (logits + self.text.bias).sigmoid()

    def predict(
        self, images: ImageInput | Iterable[ImageInput], labels: Sequence[str], *, batch_size: int = 32
    ) -> Tensor:
        """Return the probabilities (n, labels), float32 on the CPU, of one image or several, for texts as they are.

        ``dpn lit predict`` with ``--prompts plain`` does the same. Raises as `iter_pixels` does.
        """
        self.image.eval()
        self.text.eval()
        texts, parts = self.encode_texts(list(labels)), []
        pixels = iter_pixels(images, options_of_run(RunImageReading(), self.decoder, self.exif))
        while batch := [self.prepare(one) for one in itertools.islice(pixels, batch_size)]:
            parts.append(self.probabilities(self.encode_images(torch.stack(batch)) @ texts.T).cpu())
        return torch.cat(parts) if parts else torch.zeros(0, len(labels))


def describe_towers(towers: Towers) -> dict[str, Any]:
    """Return all that is not a tensor, as plain values."""
    text = towers.text
    return {
        "image": {**describe_backbone(towers.image), "image_size": list(towers.image.config.image_size)},
        "text": {"size": asdict(text.size), "size_name": size_name(text.size), "pool": "last", "causal": False},
        "tokenizer": towers.tokenizer.to_dict(),
        "loss": towers.loss,
        "decoder": towers.decoder,
        "exif": towers.exif,
        "facts": towers.facts,
    }


def save_towers(towers: Towers, path: Path) -> str:
    """Write both towers and the tokenizer as one safetensors file; returns its SHA-256. Raises `SaveError`."""
    tensors = {f"image.{name}": value for name, value in towers.image.state_dict().items()}
    tensors |= {f"text.{name}": value for name, value in towers.text.state_dict().items()}
    if towers.tokenizer.model is not None:
        tensors["tokenizer.model"] = torch.from_numpy(np.frombuffer(towers.tokenizer.model, dtype=np.uint8).copy())
    return write_weights(path, tensors, {artifact_kinds.KEY: "towers", KEY: json.dumps(describe_towers(towers))})


def load_lit(location: str, command: str = "dpn lit eval") -> Towers:
    """Load a run's folder, an export's, or the file in one of them, for `command`. Raises `DataError` for others."""
    path = Path(resolve(location, command)).expanduser()
    if path.is_dir():
        raise DataError(f"{location}: not the folder of a LiT run")
    try:
        tensors, metadata = read_weights(path)
        description = json.loads(metadata[KEY])
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise ValueError("weights that are NaN or infinite")
    except DataError as error:
        raise DataError(f"{location}: {error}") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(f"{location}: not a file of two LiT towers ({' '.join(str(error).split())[:120]})") from error
    try:
        return _build(description, tensors, str(path))
    except (KeyError, RuntimeError, TypeError) as error:
        raise DataError(f"{location}: its towers are damaged ({' '.join(str(error).split())[:120]})") from error


def _build(description: dict[str, Any], tensors: dict[str, Tensor], location: str) -> Towers:
    image, text, tokenizer_description = description["image"], description["text"], description["tokenizer"]
    source = ours.read(Contents(_select_prefix("image.", tensors), {ours.KEY: image[ours.KEY]}))
    source.source = location
    model = tensors.get("tokenizer.model")
    tokenizer = Tokenizer(
        tokenizer_description["context"],
        tokenizer_description["clean"],
        None if model is None else model.numpy().tobytes(),
        tokenizer_description["name"],
    )
    if tokenizer.digest != tokenizer_description["digest"]:
        raise DataError(
            f"{location}: trained with another version of {tokenizer_description['name']} than the one that is "
            "installed"
        )
    tower = TextTower(
        Size(**text["size"]),
        tokenizer.vocabulary,
        tokenizer.context,
        tensors["text.transformer.text_projection"].shape[1],
        1.0,
        0.0 if "text.bias" in tensors else None,
        seed=0,
    )
    tower.load_state_dict(_select_prefix("text.", tensors))
    backbone = load_backbone(checkpoint=source, stem=None, image_size=tuple(image["image_size"]))
    decoder = description.get("decoder", "pillow")  # the decoder of files without this entry
    exif = description.get("exif", False)
    return Towers(backbone, tower, tokenizer, description["loss"], description["facts"], decoder, exif)


def _select_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
