"""The commands that train: the configs of each, their schema, and the module that trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from inspect import Parameter
from typing import Annotated, Any, Literal

import typer

import tasks.classify.options
import tasks.lit.options
import tasks.segment.options
from dpn_cli.commands.one_screen import Brief
from dpn_cli.commands.options import Variant, option
from dpn_cli.commands.train_command import TrainCommand
from dpn_cli.config.load import Logger, Plain, merge, read_config
from dpn_cli.config.option import TRAIN
from dpn_cli.config.paths import CAPTIONS, CLASS_FOLDERS, IMAGE_FOLDER, MASK_FOLDERS, TASK_FOLDERS
from dpn_cli.config.schema import Config
from dpn_cli.config.training import TrainingConfig
from dpn_cli.errors import DpnError
from dpn_cli.run.console import Console
from tasks.classify import highres_config, pretrain_config
from tasks.classify.appendix_c import APPENDIX_C, LEVELS, regularization_keys
from tasks.classify.demo_weights import demo_backbone
from tasks.classify.distill import config as distill_config
from tasks.lit import config as lit_config
from tasks.segment import config as segment_config
from tasks.vtab import config as vtab_config

Settings = Mapping[str, Any]
# Schemas of the commands that do not train.
classify_options = tasks.classify.options
lit_options = tasks.lit.options
segment_options = tasks.segment.options
VTAB_TASKS_FLAG = vtab_config.TASKS_FLAG


def _failed_trials(result: dict[str, Any]) -> list[str]:
    stems = result.get("compare", {}).get("stems", {"": result})
    return [line for part in stems.values() for line in part["failed"]]


VTAB = TrainCommand(
    help="Fine-tune on VTAB-1k: 19 tasks, 3 learning rates, 3 seeds (Table 3).",
    example="dpn finetune vtab --arch B/32 --checkpoint B-32-dpn.npz --data vtab-1k",
    schema=vtab_config.VtabConfig,
    module="tasks.vtab.command",
    layout=TASK_FOLDERS,
    configs={"": "vtab", "demo": "vtab_demo", "demo with --arch": "vtab_demo_large"},
    resolve=vtab_config.resolve,
    finalize=lambda config, console, dry_run: vtab_config.finalize(config),
    failures=_failed_trials,
)


HIGHRES = TrainCommand(
    help="Fine-tune at 384 px on ImageNet-1k (Tables 1 and 2) or any labelled images.",
    example="dpn finetune highres --checkpoint B-32.npz --data photos --val-fraction 0.2 --epochs 8",
    schema=highres_config.HighresConfig,
    module="tasks.classify.highres",
    layout=CLASS_FOLDERS,
    configs={"": "highres", "demo": "highres_demo", "own images": "highres_own"},
    resolve=highres_config.resolve,
    finalize=lambda config, console, dry_run: highres_config.finalize(config),
)


PRETRAIN_CONFIGS = {
    "": "pretrain",
    "deit": "pretrain_deit",
    "s16plus": "pretrain_s16plus",
    "imagenet21k": "pretrain_imagenet21k",
    "jft": "pretrain_jft",
    "sun397": "pretrain_sun397",
    "cifar": "pretrain_cifar",
    "demo": "pretrain_demo",
    "own images": "pretrain_own",
}


def _pretrain_variants() -> list[Variant]:
    """Return the shipped configs, the usual one once for every line of Appendix C, ImageNet-21k's with that of L/16."""
    shipped = {label: read_config(name) for label, name in PRETRAIN_CONFIGS.items()}
    rows = {arch: regularization_keys(APPENDIX_C[arch]) for arch in reversed(APPENDIX_C)}
    lines = [Variant(arch, merge(shipped[""], row), "--arch") for arch, row in rows.items()]
    large_configs = {**shipped, "imagenet21k": merge(shipped["imagenet21k"], rows["L/16"])}
    return [*lines, *(Variant(label, config) for label, config in large_configs.items() if label)]


def _resolve_pretrain(
    config_file: str | None,
    flags: Settings,
    settings: Settings,
    log: Logger,
    *,
    name: str | None,
    base_config: str | None,
    preset: str | None,
    augment: str | None,
) -> Plain:
    if name and base_config and name not in (base_config, pretrain_config.DATA.get(base_config)):
        raise DpnError(f"'{name}' and --base-config {base_config}: give one of them")
    if preset not in (None, "short"):
        raise DpnError(f"--preset {preset!r}: the only preset is short")
    pretrain_preset: Literal["short"] | None = "short" if preset else None
    return pretrain_config.resolve(base_config or name, pretrain_preset, augment, config_file, flags, settings, log)


PRETRAIN = TrainCommand(
    help="Pre-train a backbone with any stem on ImageNet, SUN397 or your own images.",
    example="dpn pretrain imagenet --arch B/32 --data imagenet",
    schema=pretrain_config.PretrainConfig,
    module="tasks.classify.pretrain",
    layout=CLASS_FOLDERS,
    configs=PRETRAIN_CONFIGS,
    variants=_pretrain_variants,
    resolve=_resolve_pretrain,
    finalize=lambda config, console, dry_run: pretrain_config.finalize(config),
    extra=(
        Parameter(
            "name",
            Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Argument(
                    metavar="[CONFIG]",
                    help="imagenet is Appendix C, for any labelled images; imagenet21k and jft (any classes) train by "
                    "steps and are probed on ImageNet; sun397 is Appendix F's three stages; cifar10, "
                    "cifar100 and folder (any classes) train a ViT-S with AutoAugment. "
                    "\\[default: imagenet; own images: the config pretrain_own]",
                    show_default=False,
                ),
                Brief("imagenet, imagenet21k, jft, sun397, cifar10, cifar100 or folder."),
            ],
        ),
        option(
            "preset",
            str | None,
            None,
            "--preset",
            help="short: of imagenet 90 epochs with big_vision's lighter config, 0.3 of the work; of cifar10, cifar100 "
            "and folder 100 epochs of S/4 at 32 px, for one small GPU. "
            "\\[default: none]",
            panel=TRAIN,
        ),
        option(
            "augment",
            str | None,
            None,
            "--augment",
            help=f"Level of RandAugment and mixup: {', '.join(LEVELS)}. \\[default: by --arch: Appendix C's for "
            f"{', '.join(APPENDIX_C)}]",
            panel=TRAIN,
        ),
        option(
            "base_config",
            str | None,
            None,
            "--base-config",
            help=f"Another config than that of the data: {', '.join(pretrain_config.CONFIGS)}. "
            "\\[default: the argument]",
        ),
    ),
)


def _with_demo_backbone(
    finalize: Callable[..., TrainingConfig],
) -> Callable[[TrainingConfig, Console, bool], TrainingConfig]:
    """Return a `finalize` that trains the demo's tower, unless it is there, for a demo that names no weights."""

    def finalize_with_demo(config: TrainingConfig, console: Console, dry_run: bool) -> TrainingConfig:
        finalized = finalize(config)
        if finalized.backbone.checkpoint is not None:
            return finalized
        return finalize(config, demo_backbone(config.backbone.stem or "dpn", console, trained=not dry_run))

    return finalize_with_demo


LIT = TrainCommand(
    help="Train a text tower from scratch; images are encoded only once.",
    example="dpn lit train --checkpoint B-32-dpn.npz --data pairs.csv -b 4096 --steps 5000",
    schema=lit_config.LitConfig,
    module="tasks.lit.command",
    layout=CAPTIONS,
    configs={"": "lit", "demo": "lit_demo"},
    resolve=lit_config.resolve,
    finalize=_with_demo_backbone(lit_config.finalize),
    scores=("zeroshot.top1", "retrieval.image_to_text@1", "retrieval.text_to_image@1"),
)


def _segmentation(config: str, **fields: Any) -> TrainCommand:
    return TrainCommand(
        schema=segment_config.SegmentConfig,
        module="tasks.segment.command",
        layout=MASK_FOLDERS,
        configs={"": config, "demo": "ade20k_demo"},
        resolve=partial(segment_config.resolve, config),
        finalize=_with_demo_backbone(segment_config.finalize),
        scores=("miou",),
        **fields,
    )


ADE20K = _segmentation(
    "ade20k",
    help="Train on ADE20K with 150 classes, or a nested subset of it (Table 5).",
    example="dpn segment ade20k --arch B/16 --checkpoint B-16-dpn.npz --data ADEChallengeData2016 --fraction 0.25",
    without=frozenset({"data.classes", "data.label_offset", "data.ignore_label"}),
)
FOLDER = _segmentation(
    "segment",
    help="Train on your own images with masks, in ADE20K's layout or from the hub.",
    example="dpn segment folder --arch B/16 --checkpoint B-16-dpn.npz --data DIR --epochs 20",
)


def _finalize_distill(
    config: distill_config.DistillConfig, console: Console, dry_run: bool
) -> distill_config.DistillConfig:
    if config.demo and config.teacher is None:
        return distill_config.finalize(config, demo_backbone("none", console, trained=not dry_run))
    return distill_config.finalize(config)


DISTILL = TrainCommand(
    help="Distill a trained ViT into one with another stem, norm or size, using unlabelled images.",
    example="dpn distill --teacher timm:vit_base_patch32_224.augreg_in21k_ft_in1k --stem dpn --data photos",
    schema=distill_config.DistillConfig,
    module="tasks.classify.distill.command",
    layout=IMAGE_FOLDER,
    configs={"": "distill", "demo": "distill_demo"},
    resolve=distill_config.resolve,
    finalize=_finalize_distill,
    scores=("agreement",),
)

# Every command that trains, by its words after ``dpn``.
TRAIN_COMMANDS: dict[str, TrainCommand] = {
    "finetune vtab": VTAB,
    "finetune highres": HIGHRES,
    "lit train": LIT,
    "pretrain": PRETRAIN,
    "distill": DISTILL,
    "segment ade20k": ADE20K,
    "segment folder": FOLDER,
}

# The module of the task that reads a run of each kind; `findings` in it returns what a page shows.
PAGES = {
    "classifier": "tasks.classify.page",
    "network": "tasks.classify.page",
    "segmenter": "tasks.segment.page",
    "towers": "tasks.lit.page",
    "sweep": "tasks.vtab.page",
}
# The kind of artifact that an evaluation measured, by the task in its result.
EVALUATIONS = {"eval": "classifier", "segment eval": "segmenter", "lit eval": "towers"}
# By the words of a command, the module of its task. It is imported when the command runs, because it loads torch.
MODULES = {
    "data check vtab": "tasks.vtab.datacheck",
    "data check highres": "tasks.classify.datacheck",
    "data check pretrain": "tasks.classify.datacheck",
    "data check distill": "tasks.classify.distill.datacheck",
    "data check lit": "tasks.lit.datacheck",
    "data check ade20k": "tasks.segment.datacheck",
    "data check folder": "tasks.segment.datacheck",
    "data prepare vtab": "tasks.vtab.prepare.command",
    "data prepare ade20k": "tasks.segment.prepare",
    "data prepare coco": "tasks.lit.prepare",
    "eval": "tasks.classify.evaluate",
    "eval fewshot": "tasks.classify.fewshot",
    "eval fewshot --compare": "tasks.classify.fewshot_sweep",
    "predict": "tasks.classify.predict",
    "export": "tasks.classify.export",
    "lit cache": "tasks.lit.command",
    "lit eval": "tasks.lit.evaluate",
    "lit predict": "tasks.lit.predict",
    "lit search": "tasks.lit.search",
    "lit export": "tasks.lit.export",
    "plan pretrain": "tasks.classify.plan",
    "plan distill": "tasks.classify.distill.plan",
    "plan vtab": "tasks.vtab.plan",
    "segment eval": "tasks.segment.evaluate",
    "segment predict": "tasks.segment.predict",
}


def module_of(command: str) -> Any:
    """Import the module of a task that does the work of a command, given by its words after ``dpn``."""
    return import_module(MODULES[command])


def schema_of(plain: Plain, name: str) -> type[Config]:
    """Return the schema of a config, whose ``about.command`` names its command. Raises `DpnError` for another one."""
    about = plain.get("about")
    command = str(about.get("command")) if isinstance(about, dict) else ""
    for words, training in TRAIN_COMMANDS.items():
        if f"{command} ".startswith(f"dpn {words} "):
            return training.schema
    commands = ", ".join(f"'dpn {words} …'" for words in TRAIN_COMMANDS)
    raise DpnError(f"{name}: about.command is {command!r}, which has no config; write one of {commands}")
