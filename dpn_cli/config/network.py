"""The network section of configs: which ViT, with which stem and norms, and where its weights come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from dpn_cli.arch import COMMON_ARCHS, NORMS, PLACEMENTS, SIZES, STEMS, Norm, Placement, Pool, Stem, parse_arch
from dpn_cli.config.option import MODEL, flag
from dpn_cli.config.schema import NonNegativeInt, Pixels, Positive, Section, split_list


def _complete_arch(incomplete: str) -> list[str]:
    return [arch for arch in COMMON_ARCHS if arch.startswith(incomplete)]


def _complete_stem(incomplete: str) -> list[tuple[str, str]]:
    return [(stem, text) for stem, text in STEMS.items() if stem.startswith(incomplete)]


def _complete_norm(incomplete: str) -> list[tuple[str, str]]:
    return [(norm, text) for norm, text in NORMS.items() if norm.startswith(incomplete)]


def _complete_placement(incomplete: str) -> list[tuple[str, str]]:
    return [(placement, text) for placement, text in PLACEMENTS.items() if placement.startswith(incomplete)]


ARCH = flag(
    "--arch",
    help=f"ViT as SIZE/PATCH: {', '.join(SIZES)} and a patch side in pixels.",
    panel=MODEL,
    unset="the checkpoint's",
    complete=_complete_arch,
    brief="ViT as SIZE/PATCH, e.g. B/32.",
)
STEM = flag(
    "--stem",
    help=f"Patch stem: {', '.join(STEMS)}.",
    panel=MODEL,
    unset="the checkpoint's; dpn from scratch",
    complete=_complete_stem,
    brief="Patch stem: dpn, none, or another.",
)
NORM = flag(
    "--norm",
    help=f"Norm of the transformer blocks: {', '.join(NORMS)}.",
    panel=MODEL,
    unset="the checkpoint's; ln from scratch",
    complete=_complete_norm,
)
PLACEMENT = flag(
    "--placement",
    help="Position of the norms in a block: ATTENTION,MLP, each pre, post or pre+post; or normformer or subln.",
    panel=MODEL,
    unset="the checkpoint's; pre,pre from scratch",
    complete=_complete_placement,
)
IMAGE_SIZE = flag(
    "--image-size",
    help="Input size in pixels, N or HxW, a multiple of the patch.",
    panel=MODEL,
    unset="the checkpoint's; 224 from scratch",
    brief="Input size in pixels.",
)
DROP_PATH = flag("--drop-path", help="Stochastic depth rate of the last block.", panel=MODEL)
Freeze = Annotated[
    tuple[str, ...],
    BeforeValidator(split_list),
    flag(
        "--freeze",
        help="Parts to freeze: stem, positions, blocks, blocks:0-5, norm, backbone.",
        panel=MODEL,
    ),
]


class NormOptions(Section):
    """Finer choices of the norms in the blocks; each belongs to some norms or placements and is refused with others.

    `eps` and `final`, which readers of foreign files set, go with every norm. Null is the network's epsilon, and for
    `dtn_blocks` all but the last sixth of the blocks (10 of 12), as the released code of arXiv 2112.02624 has it.
    `class_token_at` is the block before which the class token joins; null is the first one, with dtn the one after its
    blocks. In that code it is the eleventh (10) whatever the norm, LayerNorm included.
    """

    eps: Annotated[float, Field(ge=0, lt=1)] | None = None
    post: Literal["residual", "branch"] = "residual"
    head_scale: bool = True
    res_scale: bool = False
    subln_init: bool = True
    stem: Literal["ln", "same"] = "ln"
    final: Literal["ln", "same", "none"] = "ln"
    dtn: Literal["paper", "released"] = "paper"
    dtn_statistics: Literal["both", "variance"] = "both"
    dtn_blocks: Positive | None = None
    class_token_at: Positive | None = None
    in_unbiased: bool = False
    group_scale: bool = False
    power_warmup: NonNegativeInt = 3000
    prepbn_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    un_warmup: NonNegativeInt = 4000
    un_filter: bool = True


class BackboneConfig(Section):
    """Architecture of the ViT and source of its weights."""

    arch: Annotated[str | None, ARCH] = None
    stem: Annotated[Stem | None, STEM] = None
    norm: Annotated[Norm | None, NORM] = None
    placement: Annotated[Placement | None, PLACEMENT] = None
    norm_options: NormOptions | None = None
    checkpoint: Annotated[
        str | None,
        flag(
            "--checkpoint",
            help="Weights: a file of any format that 'dpn checkpoint inspect' reads, timm:NAME, hf-hub:OWNER/NAME, "
            "or 'none' for from scratch.",
            panel=MODEL,
            unset="ARCH-STEM.safetensors in $DPN_HOME/weights",
            brief="Weights: a file, timm:NAME, hf-hub:OWNER/NAME, or none.",
        ),
    ] = None
    image_size: Annotated[Pixels | None, IMAGE_SIZE] = None
    pool: Pool | None = None
    pre_logits: bool | None = None
    registers: NonNegativeInt | None = None
    distillation_token: bool | None = None
    layer_scale: Annotated[float, Field(gt=0)] | None = None
    swiglu: bool | None = None
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0
    grad_checkpointing: bool = False

    @model_validator(mode="after")
    def _known_arch(self) -> BackboneConfig:
        if self.arch is not None:
            parse_arch(self.arch)
        return self
