"""Recipe, labels, class names and pairs of segmentation: what a command says becomes what is trained on, or an error."""

from __future__ import annotations

import pytest

from dpn_cli import recipe as recipes
from dpn_cli.errors import DpnError
from tasks.segment.recipe import SegmentRecipe, in_steps, resolve


def built(source: str, **changes: object) -> SegmentRecipe:
    return recipes.build(SegmentRecipe, resolve("ade20k", None, {"data": {"source": source}, **changes}, {}), "test")


def test_the_warm_up_keeps_its_share_of_epochs() -> None:
    schedule = in_steps(built("demo", epochs=1), 384).schedule
    assert (schedule.steps, schedule.warmup) == (24, 1)  # the demo's 50 of 1200
    with pytest.raises(DpnError, match="decay_from, cooldown and stairs count steps"):
        in_steps(built("demo", epochs=1, schedule={"cooldown": 100}), 384)
