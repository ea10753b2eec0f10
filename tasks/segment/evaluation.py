"""`dpn segment eval`: a finished segmenter scored on validation images, in the run's way or another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpn_cli import distributed, engine, stopping
from dpn_cli.console import Console
from dpn_cli.data.reading import Decoder
from dpn_cli.distributed import World, join
from dpn_cli.errors import DataError
from dpn_cli.files import replace_json, replace_text
from dpn_cli.recipe import Runtime
from dpn_cli.runstate import open_report
from tasks.segment.check import check_masks
from tasks.segment.classes import classes_of, listed_in
from tasks.segment.pairs import Pairs, fingerprint, open_pairs
from tasks.segment.recipe import Data, Evaluation
from tasks.segment.scoring import SegmentScores, score
from tasks.segment.segmenter import Segmenter, load_segmenter


@dataclass(frozen=True)
class Asked:
    """What ``dpn segment eval`` was asked to do; None keeps what the run did."""

    run: str
    source: str | None = None
    mode: str | None = None
    size: str | None = None
    stride: int | None = None
    scales: tuple[float, ...] | None = None
    flip: bool | None = None
    output_dir: Path | None = None
    decode: Decoder | None = None
    max_pixels: int | None = None

    def evaluation(self, before: Evaluation) -> Evaluation:
        """Return the run's way of evaluating with what was asked in place of it."""
        given = {"mode": self.mode, "size": self.size, "stride": self.stride, "scales": self.scales, "flip": self.flip}
        return Evaluation.model_validate(
            {**before.model_dump(), **{key: value for key, value in given.items() if value is not None}}
        )


def evaluate(asked: Asked, runtime: Runtime, console: Console) -> dict[str, Any] | None:
    """Score a segmenter and return the result, written to `output_dir` too; None on ranks that do not lead.

    Raises `DataError` when data and segmenter do not fit each other, `DpnError` when `output_dir` holds a run.
    """
    with stopping.listen(stopping.NO_RESULT), join(runtime.device) as world:
        if asked.output_dir and world.leads:
            open_report(asked.output_dir)
        segmenter = load_segmenter(asked.run, "dpn segment eval")
        given = {"source": asked.source, "decode": asked.decode, "max_pixels": asked.max_pixels}
        data = segmenter.data.model_copy(update={key: value for key, value in given.items() if value is not None})
        if segmenter.data.source == "demo" and data.source != "demo":
            data = data.model_copy(update={"dataset": "folder"})  # the demo's recipe is ADE20K's, its classes are not
        _check_classes(data, segmenter)
        pairs = open_pairs(data, "val")
        if world.leads:
            check_masks(pairs, segmenter.rule)
        evaluation = asked.evaluation(segmenter.evaluation)
        console.info(f"{len(pairs)} images of {len(segmenter.classes)} classes")
        segmenter.network.to(world.device)
        scores, described = score_sizes(segmenter, pairs, evaluation, runtime, world)
        result = {
            "task": "segment eval",
            "network": asked.run,
            "data": data.source,
            "fingerprint": fingerprint(pairs),
            "decoder": pairs.reading.describe(),
            "arch": segmenter.arch,
            "classes": len(segmenter.classes),
            **described,
        }
        if asked.output_dir and world.leads:
            replace_json(asked.output_dir / "result.json", result)
            replace_text(asked.output_dir / "per_class.csv", scores.per_class(segmenter.classes))
        distributed.barrier()
        return result if world.leads else None


def score_once(
    segmenter: Segmenter, pairs: Pairs, evaluation: Evaluation, runtime: Runtime, world: World
) -> SegmentScores:
    """Score a split in one way: at the images' own size where `evaluation` says both."""
    with engine.precision_of(runtime, world.device):
        plan = segmenter.plan(evaluation)
        return score(segmenter.network, pairs, segmenter.rule, plan, world, workers=runtime.workers)


def score_sizes(
    segmenter: Segmenter, pairs: Pairs, evaluation: Evaluation, runtime: Runtime, world: World
) -> tuple[SegmentScores, dict[str, Any]]:
    """Score a split at the size, or both sizes, of `evaluation`; returns the scores and their part of a result."""
    scores = score_once(segmenter, pairs, evaluation, runtime, world)
    described = scores.to_dict()
    if evaluation.beside:
        resized = score_once(segmenter, pairs, evaluation.beside, runtime, world).to_dict()
        described["resized"] = {key: resized[key] for key in ("miou", "pixel_accuracy", "mean_accuracy")}
    return scores, {**described, "evaluation": evaluation.model_dump(mode="json")}


def _check_classes(data: Data, segmenter: Segmenter) -> None:
    """Raise `DataError` for data of other classes than the run's; where no names are listed, the run's hold."""
    if data.dataset == "folder" and data.source != "demo" and not listed_in(data).is_file():
        return
    names = [one.name for one in classes_of(data)]
    if names != [one.name for one in segmenter.classes]:
        raise DataError(f"--data {data.source}: its {len(names)} classes are not those that the run was trained on")
