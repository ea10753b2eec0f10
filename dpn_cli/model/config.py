"""`ViTConfig`: the architecture of a Vision Transformer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dpn_cli.arch import Norm, Placement, Pool, Posemb, Size, Stem, size_name
from dpn_cli.config.network import NormOptions
from dpn_cli.errors import DpnError

# Norms that are a scale and a shift per channel in evaluation, whatever the input.
OFFLINE: tuple[Norm, ...] = ("bn", "powernorm", "un", "prepbn")


def default_dtn_blocks(depth: int) -> int:
    """Return the default number of blocks with DTN's norms: 10 of 12, as in its released code."""
    return max(1, depth - max(1, depth // 6))


@dataclass(frozen=True)
class ViTConfig:
    """Architecture of a network: every choice that is not a weight. Sizes are in pixels.

    Raises `DpnError` for norms that do not fit the rest of the network.
    """

    size: Size
    patch: tuple[int, int]
    image_size: tuple[int, int]
    stem: Stem = "dpn"
    pool: Pool = "tok"
    pre_logits: bool = False
    posemb: Posemb = "learn"
    eps: float = 1e-6  # flax's LayerNorm default, since arXiv 2302.01327 states none; torch's is 1e-5
    act: Literal["gelu_tanh", "gelu", "quick_gelu"] = "gelu_tanh"  # flax's gelu is the tanh form
    num_classes: int = 0
    drop_path: float = 0.0
    drop_path_rescale: bool = True  # Scenic's and timm's rule; big_vision's MLP-Mixer does not rescale
    dropout: float = 0.0
    pre_norm: bool = False  # CLIP's ln_pre: a norm of all tokens, class token and positions included
    fc_norm: bool = False  # the final norm follows the pooling instead of the blocks
    mean_beside_class_token: bool = False  # with pool=gap: blocks have a class token, and the mean leaves it out
    attn_width: int | None = None  # heads times head width where that is not the trunk's width
    registers: int = 0  # tokens in front of the patches' that no head reads (arXiv 2309.16588)
    distillation_token: bool = False  # DeiT's: its mean with the class token is the representation (arXiv 2012.12877)
    distillation_head: bool = False  # a head of its own for the distillation token; the logits are averaged
    layer_scale: float | None = None  # initial scale per channel of every branch (arXiv 2103.17239)
    swiglu: bool = False  # MLPs of silu(gate) * x (arXiv 2002.05202); size.mlp is the width of each
    norm: Norm = "ln"  # of the blocks
    placement: Placement = "pre,pre"
    norm_options: NormOptions = field(default_factory=NormOptions)

    def __post_init__(self) -> None:
        _check_options(self)
        if self.distillation_token and self.pool != "tok":
            raise DpnError(f"backbone.distillation_token=true: needs pool=tok, and this network has pool={self.pool}")
        heads, grid = self.size.heads, self.grid
        if self.posemb == "rope" and (self.attn_width or self.size.width) // heads % 4:
            raise DpnError("backbone.posemb=rope: its angles are in fours, and 4 does not divide the width of a head")
        if self.norm in ("gn", "dtn") and self.size.width % heads:
            raise DpnError(f"--norm {self.norm}: its groups are the {heads} heads, which do not divide the width")
        if self.norm == "in" and grid[0] * grid[1] == 1:
            raise DpnError(
                "--norm in: its statistics are over the tokens of an image, which has only one; use a larger "
                "--image-size, a smaller patch, or another norm"
            )
        if self.norm == "dtn" and self.dtn_blocks > self.size.depth - (self.prefix_tokens > 0):
            most = self.size.depth - (self.prefix_tokens > 0)
            condition = ", and the class token joins after those" if self.has_class_token else ""
            condition = condition or (", and the registers join after those" if self.registers else "")
            remedy = f"--set backbone.norm_options.dtn_blocks={most}" if most else "a deeper --arch"
            raise DpnError(
                f"--norm dtn: its norms mix the tokens of a whole grid in the first {self.dtn_blocks} of the blocks"
                f"{condition}, but {self.arch} has {self.size.depth}; use {remedy} or --set backbone.pool=gap"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Patches per column and row (h, w)."""
        return self.image_size[0] // self.patch[0], self.image_size[1] // self.patch[1]

    @property
    def arch(self) -> str:
        """The value for ``--arch``, such as ``"B/32"``; a description of a trunk without a name."""
        return f"{size_name(self.size) or self.size}/{self.patch[0]}"

    @property
    def norm_eps(self) -> float:
        """Epsilon of the norms in the blocks."""
        return self.eps if self.norm_options.eps is None else self.norm_options.eps

    @property
    def dtn_blocks(self) -> int:
        """Number of leading blocks with DTN's norms; the others have LayerNorm. 0 with another norm."""
        if self.norm != "dtn":
            return 0
        return self.norm_options.dtn_blocks or default_dtn_blocks(self.size.depth)

    @property
    def has_class_token(self) -> bool:
        """Return whether blocks have a class token, for pooling or left out of the mean."""
        return self.pool == "tok" or self.mean_beside_class_token

    @property
    def mlp_rows(self) -> int:
        """Number of outputs of the first layer of a block's MLP: with SwiGLU those of the gate, too."""
        return self.size.mlp * (2 if self.swiglu else 1)

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens in front of those of the patches: class and distillation token, and registers."""
        return self.has_class_token + self.distillation_token + self.registers

    @property
    def class_token_at(self) -> int:
        """Index of the block before which the class token, and all others but the patches', join the patch tokens."""
        return (self.norm_options.class_token_at or self.dtn_blocks) if self.prefix_tokens else 0

    def norm_of(self, block: int) -> Norm:
        """Return the norm of a block, counted from 0."""
        return "ln" if self.norm == "dtn" and block >= self.dtn_blocks else self.norm

    @property
    def plain_norms(self) -> bool:
        """Return whether the blocks are a plain ViT's: LayerNorm before attention and MLP."""
        return (self.norm, self.placement) == ("ln", "pre,pre") and self.norm_options.eps is None

    def __str__(self) -> str:
        norms = "" if self.norm == "ln" else f", norm {self.norm}"
        norms += "" if self.placement == "pre,pre" else f", placement {self.placement}"
        parts = {
            f"{self.registers} registers": self.registers,
            "distillation token": self.distillation_token,
            "LayerScale": self.layer_scale,
            "SwiGLU": self.swiglu,
        }
        extra = "".join(f", {text}" for text, is_present in parts.items() if is_present)
        return f"{self.arch}, stem {self.stem}{norms}{extra}, {self.image_size[0]}x{self.image_size[1]} px"


def _check_options(config: ViTConfig) -> None:
    """Raise `DpnError` for an option of the norms that has no effect on this network."""
    requirements = {
        "post": ("post" in config.placement, "a --placement with post"),
        "head_scale": (config.placement == "normformer", "--placement normformer"),
        "res_scale": (config.placement == "normformer", "--placement normformer"),
        "subln_init": (config.placement == "subln", "--placement subln"),
        "stem": (
            config.norm in (*OFFLINE, "rms") and config.stem in ("pre", "post", "post_posemb", "dpn"),
            f"--norm {', '.join(OFFLINE)} or rms and --stem pre, post, post_posemb or dpn",
        ),
        "final": (
            config.norm_options.final == "none" or (config.norm not in ("ln", "dtn") and not config.fc_norm),
            "a --norm other than ln and dtn",
        ),
        "dtn": (config.norm == "dtn", "--norm dtn"),
        "dtn_statistics": (config.norm == "dtn", "--norm dtn"),
        "dtn_blocks": (config.norm == "dtn", "--norm dtn"),
        "class_token_at": (
            config.has_class_token and config.dtn_blocks <= config.class_token_at < config.size.depth,
            "a class token (pool=tok) and a block behind those of --norm dtn",
        ),
        "in_unbiased": (config.norm == "in", "--norm in"),
        "group_scale": (config.norm == "powernorm", "--norm powernorm"),
        "power_warmup": (config.norm == "powernorm", "--norm powernorm"),
        "prepbn_share": (config.norm == "prepbn", "--norm prepbn"),
        "un_warmup": (config.norm == "un", "--norm un"),
        "un_filter": (config.norm == "un", "--norm un"),
    }
    for key, (is_met, requirement) in requirements.items():
        value = getattr(config.norm_options, key)
        if not is_met and value != NormOptions.model_fields[key].default:
            raise DpnError(
                f"backbone.norm_options.{key}={value}: needs {requirement}, and this network has --norm {config.norm} "
                f"--placement {config.placement} --stem {config.stem}; leave it out"
            )
