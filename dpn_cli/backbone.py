"""`load_backbone`: the one door through which every task gets its Vision Transformer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from dpn_cli.arch import Pool, Size, Stem, check_image_size, check_stem, parse_arch, size_name
from dpn_cli.checkpoints import Act, Checkpoint, describe, from_timm, read_file
from dpn_cli.errors import DataError, DpnError
from dpn_cli.files import replace_file
from dpn_cli.hub import fetch, offline
from dpn_cli.vit import DPNViT, ViTConfig, resample_posemb

HEAD = ("head.weight", "head.bias")
Rgb = tuple[float, float, float]


@dataclass
class LoadReport:
    """What happened between a weight file and the network: nothing happens that is not written here."""

    source: str
    format: str
    digest: str = ""
    parameters: int = 0
    renamed: dict[str, str] = field(default_factory=dict)
    resized: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Return the report in one line, names only where there are few."""
        parts = [f"{self.source} ({self.format}, {self.parameters / 1e6:.2f} M parameters)"]
        parts += [f"{len(self.renamed)} arrays renamed"] if self.renamed else []
        parts += [
            f"{label} {', '.join(names)}"
            for label, names in (("resized", self.resized), ("dropped", self.dropped), ("new", self.new))
            if names
        ]
        return "; ".join(parts + self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for run.json."""
        return asdict(self)


class Backbone(DPNViT):
    """A `DPNViT` that remembers how it was loaded and what its inputs look like."""

    input_mean: Tensor
    input_std: Tensor

    def __init__(self, config: ViTConfig, mean: Rgb, std: Rgb, report: LoadReport) -> None:
        super().__init__(config)
        self.mean, self.std, self.report = mean, std, report
        for name, values in (("input_mean", mean), ("input_std", std)):
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)

    def normalize(self, image: Tensor) -> Tensor:
        """Map uint8 pixels (b, 3, h, w) to the input range that the weights were trained with."""
        return (image.float() / 255 - self.input_mean) / self.input_std


def load_backbone(
    arch: str | None = None,
    *,
    stem: str = "dpn",
    checkpoint: str | None = None,
    image_size: int | tuple[int, int] = 224,
    num_classes: int = 0,
    head: Literal["new", "load"] = "new",
    pool: Pool | None = None,
    pre_logits: bool | None = None,
    drop_path: float = 0.0,
    grad_checkpointing: bool = False,
    align_corners: bool = True,
    seed: int = 0,
) -> Backbone:
    """Build a ViT and fill it from a weight file, or with big_vision's initialisation.

    Args:
        arch: ``"SIZE/PATCH"``; may be left out with a checkpoint, which then decides.
        stem: one of Table 6's; must be the one that the checkpoint has.
        checkpoint: a path, ``timm:NAME``, ``hf-hub:OWNER/NAME[/FILE]``; None or ``"none"`` starts from scratch.
        image_size: pixels, one number or (height, width); position embeddings are resampled to it.
        num_classes: classes of the head; 0 for none. A new head is zero.
        head: ``"load"`` takes the checkpoint's head and insists on `num_classes`; ``"new"`` drops it.
        pool: ``"tok"`` or ``"gap"``; None takes the checkpoint's, or ``"tok"`` from scratch.
        pre_logits: from scratch only: add the dense tanh layer before the head.
        drop_path: stochastic depth rate of the last block; block l of L gets l / (L - 1) of it.
        grad_checkpointing: trade time for memory in the blocks.
        align_corners: how position embeddings are resampled, see `resample_posemb`.
        seed: of the initialisation from scratch.

    Raises:
        DpnError: unknown arch or stem, or a checkpoint that is another network; lists ``-`` and ``+`` tensors.
        DataError: a missing, damaged or unreachable file.
    """
    if checkpoint is None or checkpoint == "none":
        if arch is None:
            raise DpnError("--arch is needed to train from scratch; with --checkpoint it is inferred")
        size, side = parse_arch(arch)
        config = ViTConfig(
            size,
            (side, side),
            check_image_size(image_size, (side, side)),
            check_stem(stem),
            pool or "tok",
            bool(pre_logits),
            num_classes=num_classes,
            drop_path=drop_path,
        )
        model = Backbone(
            config, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), LoadReport("from scratch", f"big_vision init, seed {seed}")
        )
        model.initialize(seed)
    else:
        source = _open(checkpoint)
        _check_stem_agrees(source, check_stem(stem), checkpoint)
        config = replace(
            _config_of(source, arch, checkpoint, pool, image_size), num_classes=num_classes, drop_path=drop_path
        )
        if pre_logits is not None and pre_logits != config.pre_logits:
            raise DpnError(
                f"backbone.pre_logits={pre_logits}: {checkpoint} was trained with "
                f"{config.pre_logits}; leave the key out"
            )
        report = LoadReport(
            source.source,
            source.format,
            source.digest,
            renamed=source.renamed,
            dropped=list(source.dropped),
            notes=list(source.notes),
        )
        model = Backbone(config, source.mean, source.std, report)
        _fill(model, source, head, align_corners)
    model.report.parameters = sum(parameter.numel() for parameter in model.parameters())
    model.set_grad_checkpointing(grad_checkpointing)
    return model


def export_backbone(
    model: DPNViT,
    path: Path,
    *,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    extra: Mapping[str, str] | None = None,
) -> str:
    """Write a network in our layout as safetensors with its description; returns the file's SHA-256.

    `load_backbone` reads it back to the bit. The write is atomic. Raises `SaveError` when it fails.
    """
    config = model.config
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    described = describe(
        Checkpoint(
            state, "dpn", config.stem, config.eps, config.act, config.size.heads, config.grid, mean, std, config.posemb
        )
    )
    return replace_file(path, lambda temporary: save_file(state, temporary, {**described, **(extra or {})}))


def _open(checkpoint: str) -> Checkpoint:
    kind, _, name = checkpoint.partition(":")
    if kind == "timm" and name:
        return _from_timm_model(name)
    if kind == "hf-hub" and name:
        return _from_hub(name)
    return read_file(Path(checkpoint).expanduser())


def _from_hub(name: str) -> Checkpoint:
    owner, _, rest = name.partition("/")
    repo, _, filename = rest.partition("/")
    if not owner or not repo:
        raise DpnError(f"--checkpoint hf-hub:{name}: write hf-hub:OWNER/NAME or hf-hub:OWNER/NAME/FILE")
    checkpoint = read_file(Path(fetch(f"{owner}/{repo}", filename or "model.safetensors")))
    checkpoint.source = f"hf-hub:{name}"
    if checkpoint.format == "timm" and not filename:
        described = json.loads(Path(fetch(f"{owner}/{repo}", "config.json")).read_text(encoding="utf-8"))
        inputs = described.get("pretrained_cfg", described)
        checkpoint.mean, checkpoint.std = tuple(inputs["mean"]), tuple(inputs["std"])
        checkpoint.notes[-1] = f"mean {checkpoint.mean} and std {checkpoint.std} are config.json's; erf GELU, eps 1e-6"
    return checkpoint


def _from_timm_model(name: str) -> Checkpoint:
    """Fetch a timm model's weights and take eps, GELU, heads, grid and input range from its own modules."""
    import timm
    from timm.models.vision_transformer import VisionTransformer

    if not timm.is_model(name):
        close = ", ".join(timm.list_models(f"*{name.split('.')[0][:12]}*")[:3]) or "see timm.list_models('vit_*')"
        raise DpnError(f"--checkpoint timm:{name}: timm has no such model ({close})")
    unreachable = offline()
    try:
        model = timm.create_model(name, pretrained=True)
    except (OSError, RuntimeError) as error:  # the hub client's errors are of both kinds
        where = "the hub is out of reach and the weights are not in its cache" if unreachable else str(error)[:160]
        raise DataError(
            f"--checkpoint timm:{name}: {where}. On a machine with a network: "
            f"timm.create_model({name!r}, pretrained=True), then copy the hub cache or a state dict "
            "here and pass its path"
        ) from error
    if type(model) is not VisionTransformer:
        raise DpnError(f"--checkpoint timm:{name}: a {type(model).__name__}; dpn reads timm's VisionTransformer")
    acts: dict[str, Act] = {"GELU": "gelu", "GELUTanh": "gelu_tanh"}
    act = acts.get(type(model.blocks[0].mlp.act).__name__)
    if act is None:
        raise DpnError(f"--checkpoint timm:{name}: its activation is neither GELU nor its tanh form")
    checkpoint = from_timm(model.state_dict(), {})
    checkpoint.source, checkpoint.act, checkpoint.eps = f"timm:{name}", act, model.blocks[0].norm1.eps
    checkpoint.heads, checkpoint.grid = model.blocks[0].attn.num_heads, tuple(model.patch_embed.grid_size)
    checkpoint.mean, checkpoint.std = tuple(model.pretrained_cfg["mean"]), tuple(model.pretrained_cfg["std"])
    checkpoint.notes = checkpoint.notes[:-1]
    return checkpoint


def _check_stem_agrees(source: Checkpoint, stem: Stem, checkpoint: str) -> None:
    if source.stem == stem:
        return
    raise DpnError(
        f"--stem {stem}: {checkpoint} has stem {source.stem!r} and its norms cannot be guessed. "
        f"Ways out: --stem {source.stem} to use this network as it is; --checkpoint with weights that were trained "
        f"with stem {stem!r}; --checkpoint none to train from scratch"
    )


def _config_of(
    source: Checkpoint, arch: str | None, checkpoint: str, pool: Pool | None, image_size: int | tuple[int, int]
) -> ViTConfig:
    """Infer the architecture from tensor shapes and check it against `arch`."""
    state = source.state
    try:
        width, _, rows, columns = state["patch_embed.proj.weight"].shape
        depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
        mlp = state["blocks.0.mlp.fc1.weight"].shape[0]
    except (KeyError, ValueError) as error:
        raise DpnError(f"--checkpoint {checkpoint}: - {error.args[0]} is missing; not a whole ViT") from error
    asked = parse_arch(arch) if arch else None
    heads = source.heads or (asked[0].heads if asked else max(1, width // 64))  # 64 per head in all sizes but H, mu
    if not source.heads and not asked and (width, depth) == (1280, 32):
        heads = 16
    size = Size(width, depth, mlp, heads)
    if asked and asked != (size, rows):
        found = f"{size_name(size) or size}/{rows}"
        raise DpnError(f"--arch {arch}: {checkpoint} is {found}; leave --arch out, or pass another checkpoint")
    own_pool: Pool = "tok" if "cls_token" in state else "gap"
    if pool == "tok" and own_pool == "gap":
        raise DpnError(f"backbone.pool=tok: {checkpoint} has no class token; use pool=gap")
    return ViTConfig(
        size,
        (rows, columns),
        check_image_size(image_size, (rows, columns)),
        source.stem,
        pool or own_pool,
        "pre_logits.weight" in state,
        source.posemb,
        source.eps,
        source.act,
    )


def _fill(model: Backbone, source: Checkpoint, head: str, align_corners: bool) -> None:
    """Load strictly: only position embeddings may change, and only the head may be dropped or new."""
    config, report, state = model.config, model.report, dict(source.state)
    if config.pool == "gap" and "cls_token" in state:
        state.pop("cls_token")
        report.dropped.append("cls_token")
    if head == "new":
        report.dropped += [name for name in HEAD if state.pop(name, None) is not None]
        model.zero_head()
        state.update({name: value for name, value in model.state_dict().items() if name in HEAD})
        report.new += [f"{name} (zero)" for name in HEAD if config.num_classes]
    if config.posemb == "sincos2d":
        model.initialize(0)
        state["pos_embed"] = model.pos_embed.detach().clone()
        report.notes.append("the file has no position embedding: big_vision's fixed sin-cos one is used")
    elif "pos_embed" in state:
        tokens = state["pos_embed"].shape[1]
        old = source.grid or (int(tokens**0.5),) * 2
        if old[0] * old[1] == tokens and old != config.grid:
            state["pos_embed"] = resample_posemb(state["pos_embed"], old, config.grid, align_corners=align_corners)
            report.resized.append(
                f"pos_embed {old[0]}x{old[1]} -> {config.grid[0]}x{config.grid[1]} "
                f"(bilinear, align_corners={align_corners})"
            )
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    given = {name: tuple(value.shape) for name, value in state.items()}
    if expected != given:
        raise DpnError(
            f"--checkpoint {report.source}: another network than the one asked for ({_difference(expected, given)})"
        )
    model.load_state_dict({name: value.to(torch.float32) for name, value in state.items()})


def _difference(expected: dict[str, tuple[int, ...]], given: dict[str, tuple[int, ...]], most: int = 12) -> str:
    """List what is missing (-) and left over (+); a tensor of another shape is both."""
    lines = [f"- {name} {shape}" for name, shape in expected.items() if given.get(name) != shape]
    lines += [f"+ {name} {shape}" for name, shape in given.items() if expected.get(name) != shape]
    more = f", and {len(lines) - most} more" if len(lines) > most else ""
    return ", ".join(lines[:most]) + more
