"""Teacher and student: loading, the student's first weights, and checks that the two fit each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from dpn_cli.config.network import NormOptions
from dpn_cli.data.decode import decoder_of
from dpn_cli.engine.seeds import fold
from dpn_cli.errors import DpnError
from dpn_cli.model.norms import GradualNorm
from dpn_cli.run.artifact_kinds import resolve
from dpn_cli.weights.backbone import Backbone, load_backbone, load_with_head
from dpn_cli.weights.locate import open_checkpoint
from dpn_cli.weights.retrofit import Batches, convert_network, fit_stem
from tasks.classify.classifier import Classifier, classifier_of, facts_of, resize_for
from tasks.classify.distill.config import DistillConfig, Start, Student

# Share of the stem's stage in which the norms of `anneal` come in.
ANNEALED = 0.8
# Stream of a student's first weights. The seed's own stream may be that of the teacher's first weights.
DRAW = 8


def load_teacher(config: DistillConfig) -> Classifier:
    """Load the teacher with its head, if it has one, at the student's image size; it is never trained.

    Without a head it has no classes. Raises as `load_backbone` does, and `DataError` for runs of several networks.
    """
    assert config.teacher
    size = config.backbone.image_size
    pair = (size, size) if isinstance(size, int) else size
    source = open_checkpoint(resolve(config.teacher, "dpn distill"))
    if "head.weight" in source.state:
        teacher = classifier_of(source, pair)
    else:
        model = load_with_head(source, pair)
        teacher = Classifier(model, (), "softmax", resize_for(model.config.image_size), facts_of(source))
    teacher.model.requires_grad_(False).eval()
    return teacher


def describe_resize(teacher: Classifier) -> str | None:
    """Return a warning for a teacher at another image size than its own; None at its own."""
    changes = [change for change in teacher.model.report.resized if change.startswith("pos_embed")]
    if not changes:
        return None
    height, width = teacher.model.config.image_size
    return (
        f"the teacher runs at the student's {height}x{width} pixels, not at its own size ({changes[0]}): how near they "
        "are, and the teacher's accuracy, are those at this size"
    )


def with_teacher_defaults(config: DistillConfig, teacher: Classifier) -> DistillConfig:
    """Return the config with the teacher's defaults: crop and flip of images, and the start.

    Images are those on which the teacher is evaluated: whole ones or their centre. A teacher that was trained without
    flips may read digits. Raises `DpnError` as `start_of` does, for a `crop_area` of images that are not cropped at
    random, and for an `eval_resize` smaller than the teacher's images.
    """
    data, teacher_data = config.data, (teacher.facts.get("config") or {}).get("data") or {}
    crop = data.crop or ("whole" if teacher.resize_side is None else "centre")
    if crop in ("whole", "centre") and data.crop_area:
        raise DpnError(
            f"data.crop_area ({data.crop_area:g}): of random crops, and data.crop is {crop}, as the teacher takes "
            "images; leave it at null, or set data.crop"
        )
    flip = teacher_data.get("flip", True) if data.flip is None else data.flip
    backbone = config.backbone.model_copy(update={"start": start_of(config.backbone, teacher.model)})
    side, largest = data.eval_resize, max(teacher.model.config.image_size)
    if side is not None and side < largest:
        raise DpnError(
            f"data.eval_resize: the teacher's image size ({largest}) or more, as the centre of that size is cut from "
            f"what is resized (got {side})"
        )
    if crop == "centre":
        side = side or teacher.resize_side or resize_for(teacher.model.config.image_size)
    filled = data.model_copy(update={"crop": crop, "flip": flip, "eval_resize": side})
    return config.model_copy(update={"backbone": backbone, "data": filled})


def as_classifier(config: DistillConfig, teacher: Classifier, model: Backbone) -> Classifier:
    """Return teacher or student as a classifier of the teacher's classes whose images are prepared by the config."""
    side = config.data.eval_resize or teacher.resize_side or resize_for(model.config.image_size)
    decoder, exif = decoder_of(config.data.decode), config.data.exif
    is_uncropped = config.data.crop == "whole"
    return replace(teacher, model=model, resize_side=None if is_uncropped else side, decoder=decoder, exif=exif)


def start_of(student: Student, teacher: Backbone) -> Start:
    """Return the start of a student: the config's, or a default that the teacher allows.

    Raises `DpnError` where a stem cannot be fitted.
    """
    if student.scratch:
        return "scratch"
    fits = teacher.config.stem == "none" and student.stem not in ("none", "dpn_no_affine")
    if student.start in ("retrofit", "anneal") and not fits:
        raise DpnError(
            f"--start {student.start}: fits scales and biases of a stem's norms to the tokens of a plain one; the "
            f"teacher has stem {teacher.config.stem!r}, and the student's is {student.stem!r}"
            + (", which has nothing to fit" if student.stem in ("none", "dpn_no_affine") else "")
            + "; use --start copy"
        )
    return student.start or ("retrofit" if fits else "copy")


def new_student(config: DistillConfig, teacher: Backbone, images: Batches) -> tuple[Backbone, dict[str, Any]]:
    """Return the student before its first step, and the report of the fit on `images` (b, 3, h, w), uint8.

    With the teacher's own stem and norms the student is the teacher, bit for bit.
    """
    settings, vit_config = config.backbone, teacher.config
    start = start_of(settings, teacher)
    if start == "scratch":
        student = load_backbone(
            settings.arch or vit_config.arch,
            stem=settings.stem,
            norm=settings.norm,
            placement=settings.placement,
            norm_options=settings.norm_options,
            image_size=vit_config.image_size,
            num_classes=teacher.num_classes,
            pool=settings.pool or (vit_config.pool if settings.arch is None else None),
            pre_logits=vit_config.pre_logits if settings.arch is None else settings.pre_logits,
            registers=vit_config.registers if settings.registers is None else settings.registers,
            distillation_token=settings.distillation_token,
            layer_scale=settings.layer_scale,
            swiglu=settings.swiglu,
            drop_path=settings.drop_path,
            seed=fold(config.seed, DRAW),
        )
        return student, {}
    new_options = NormOptions(final="none") if vit_config.norm_options.final == "none" else NormOptions()
    same_norms = settings.norm in (None, vit_config.norm) and settings.placement in (None, vit_config.placement)
    student = convert_network(
        teacher,
        replace(
            vit_config,
            stem=settings.stem or "dpn",
            norm=settings.norm or vit_config.norm,
            placement=settings.placement or vit_config.placement,
            norm_options=settings.norm_options or (vit_config.norm_options if same_norms else new_options),
            drop_path=settings.drop_path,
        ),
        config.seed,
    )
    return student, dict(vars(fit_stem(teacher, student, images))) if start != "copy" else {}


def reload_student(config: DistillConfig, location: str, classes: int) -> Backbone:
    """Load a student that a stage of the training wrote."""
    return load_backbone(
        checkpoint=location,
        image_size=None,
        num_classes=classes,
        head="load" if classes else "new",
        drop_path=config.backbone.drop_path,
        grad_checkpointing=config.backbone.grad_checkpointing,
    )


def gate_stem_norms(network: Backbone) -> None:
    """Gate the stem's norms, which come in gradually: the network starts as the plain one with its weights."""
    for holder, slot in _stem_norms(network):
        if not isinstance(norm := getattr(holder, slot), nn.Identity):
            setattr(holder, slot, GradualNorm(norm, ANNEALED))


def remove_gates(network: Backbone) -> None:
    """Replace the gates, which are open after the stage, by their norms."""
    for holder, slot in _stem_norms(network):
        if isinstance(gate := getattr(holder, slot), GradualNorm):
            setattr(holder, slot, gate.norm)


def _stem_norms(network: Backbone) -> tuple[tuple[nn.Module, str], ...]:
    """Return the locations of a stem's norms: modules and attribute names."""
    return (network.patch_embed, "norm_in"), (network.patch_embed, "norm"), (network, "norm_posemb")


def check_pair(config: DistillConfig, teacher: Backbone, student: Backbone) -> Sequence[tuple[int, int]]:
    """Return the pairs of (student, teacher) blocks that are compared.

    Raises `DpnError` where the config compares what the two networks do not have in common.
    """
    losses, student_config, teacher_config = config.losses, student.config, teacher.config
    if losses.logits and not teacher.num_classes:
        raise DpnError(
            f"losses.logits ({losses.logits:g}): the teacher has no head, and so no logits; add --set losses.logits=0"
        )
    widths = f"the student is {student_config.size.width} wide, the teacher {teacher_config.size.width}"
    if student_config.size.width != teacher_config.size.width and losses.tokens + losses.representation:
        raise DpnError(
            f"losses.tokens ({losses.tokens:g}), losses.representation ({losses.representation:g}): {widths}; set both "
            "to 0 and compare the logits alone"
        )
    layouts = [(vit_config.grid, vit_config.prefix_tokens) for vit_config in (student_config, teacher_config)]
    if layouts[0] != layouts[1] and losses.tokens + losses.attention:
        raise DpnError(
            f"losses.tokens ({losses.tokens:g}), losses.attention ({losses.attention:g}): the student has "
            f"{_grid(student_config.grid)} patches, the teacher {_grid(teacher_config.grid)}, and in front of them "
            f"{student_config.prefix_tokens} and {teacher_config.prefix_tokens} tokens; both have to be 0"
        )
    if losses.attention and student_config.size.heads != teacher_config.size.heads:
        raise DpnError(
            f"losses.attention ({losses.attention:g}): the student has {student_config.size.heads} heads, the teacher "
            f"{teacher_config.size.heads}; set it to 0"
        )
    depths = student_config.size.depth, teacher_config.size.depth
    if not losses.layers and depths[0] > depths[1] and losses.tokens + losses.attention:
        raise DpnError(
            f"losses.layers: the student has {depths[0]} blocks, the teacher {depths[1]}; say which block of the "
            f"student matches which of the teacher, e.g. --set 'losses.layers=[[{depths[0] - 1}, {depths[1] - 1}]]'"
        )
    for pair in losses.layers:
        if not all(0 <= block < depth for block, depth in zip(pair, depths, strict=True)):
            raise DpnError(
                f"losses.layers: [{pair[0]}, {pair[1]}]: the student has the blocks 0 to {depths[0] - 1}, the teacher "
                f"0 to {depths[1] - 1}"
            )
    return losses.layers


def _grid(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"
