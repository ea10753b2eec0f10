"""Configs: layers, messages, and every shipped file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dpn_cli.commands.trainers import schema_of
from dpn_cli.config.load import (
    build,
    dump,
    from_flags,
    from_settings,
    read_config,
    shipped_configs,
)
from dpn_cli.errors import DpnError
from support.vtab import vtab_config
from tasks.classify import highres_config
from tasks.lit import config as lit_config
from tasks.segment import config as segment_config
from tasks.vtab.config import VtabConfig, finalize, resolve


@pytest.mark.parametrize("name", list(shipped_configs()))
def test_every_shipped_config_builds_and_survives_a_round_trip(name: str) -> None:
    plain = read_config(name)
    schema = schema_of(plain, name)
    built: Any = build(schema, plain, name)
    assert build(schema, yaml.safe_load(dump(built)), name) == built
    assert all(getattr(built.about, key) for key in ("paper", "table", "command", "expected"))


@pytest.mark.parametrize("about", [{}, {"about": 3}, {"about": {"command": "dpn finetune vtabs"}}])
def test_a_config_of_no_command_is_refused_with_the_list_of_configs(about: dict[str, Any]) -> None:
    with pytest.raises(DpnError, match="mine.yaml: about.command is .* write one of 'dpn finetune vtab …'"):
        schema_of(about, "mine.yaml")


def test_appendix_e_matches_the_paper() -> None:
    built = vtab_config()
    assert (built.schedule.steps, built.schedule.warmup, built.schedule.decay) == (2500, 200, "cosine")
    assert (built.batch_size, built.loss, len(built.seeds)) == (512, "sigmoid", 3)
    optim = built.optim
    assert (optim.name, optim.momentum, optim.clip_norm, optim.weight_decay) == ("momentum", 0.9, 1.0, 0.0)
    assert 3e-4 in built.lrs
    assert len(built.lrs) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["optim.momentun=0.8"], "optim.momentun: unknown key; did you mean 'optim.momentum'"),
        (["lr=0.1"], "lr: unknown key; did you mean 'lrs'"),
        (["qqqq.zzzz=1"], "qqqq: unknown key; see dpn configs show"),
        (["optim.name=sgdd"], r"optim.name: one of momentum, adam \(got 'sgdd'\)"),
        (["schedule.steps=0"], r"schedule.steps: a whole number above 0 \(got 0\)"),
        ([f"eval_batch_size={2**63}"], r"eval_batch_size: a whole number above 0 \(got 9\d*8, which is above 9\d*7\)"),
        (["runtime.micro_batch_size='1180591620717411303424'"], r"or auto \(got '\d*', which is above 9\d*7\)"),
        ([f"schedule.warmup={2**63}"], "schedule.warmup: a whole number of at least 0 .*which is above"),
        (["schedule.steps=100"], r"warmup \(200\) must be below steps \(100\): add --set schedule.warmup=8"),
        (["batch_size=many"], r"batch_size: .* \(got 'many'\)"),
        (["backbone.stem=dnp"], "backbone.stem: one of none, pre, post.*did you mean 'dpn'"),
        (["backbone.arch=B/x"], "use SIZE/PATCH"),
        (["lrs=[1e-3, 1e-3]"], "every value may be given once"),
        (["lrs=[-1]"], r"lrs: a list of one or more, each a number above 0 \(got \[-1\]\)"),
        (["compare=dpn"], "two stems or more"),
        (["seeds=[]"], "seeds: how many seeds, at most 1000, or a list of them from 0 to 4294967295"),
        (["optim=5"], "optim: "),
        (["data.augment.svhnn=[crop]"], "data.augment: svhnn: not a task of these data; .* did you mean 'svhn'"),
        (["data.augment.svhn=[crp]"], r"data.augment.svhn: a list, each one of crop, flip \(got \['crp'\]\)"),
        (["data.augment.demo_color=[crop]"], "demo_color: not a task of these data"),
        (["backbone.image_size=224xabc"], "backbone.image_size"),
    ],
)
def test_wrong_keys_and_values_are_named_with_the_allowed_ones(settings: list[str], message: str) -> None:
    with pytest.raises(DpnError, match=message) as caught:
        vtab_config(from_settings(settings))
    assert "\n" not in str(caught.value)


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(DpnError, match=r"batch_size.*optim.momentun"):
        vtab_config(from_settings(["optim.momentun=1", "batch_size=0"]))


@pytest.mark.parametrize("item", ["optim.clip_norm", "=3", "lrs=[1"])
def test_malformed_settings_are_refused(item: str) -> None:
    with pytest.raises(DpnError, match="--set"):
        from_settings([item])


def test_values_are_read_as_people_write_them() -> None:
    built = vtab_config(
        from_settings(
            ["lrs=1e-3,3e-3", "seeds=0,4", "optim.clip_norm=null", "backbone.image_size=224x160", "data.tasks=svhn,dtd"]
        )
    )
    assert (built.lrs, built.seeds, built.optim.clip_norm) == ((1e-3, 3e-3), (0, 4), None)
    assert (built.backbone.image_size, built.data.tasks) == ((224, 160), ("svhn", "dtd"))
    assert vtab_config(from_flags({"seeds": "5", "lrs": "0.1"})).seeds == (0, 1, 2, 3, 4)
    assert vtab_config({"backbone": {"image_size": "384"}}).backbone.image_size == 384


def test_the_augmentation_of_tasks_is_changed_one_by_one() -> None:
    default = vtab_config().data.augment
    assert (default["svhn"], default["dsprites_loc"], default["kitti"]) == (("crop", "flip"), (), ("flip",))
    changed = vtab_config(from_settings(["data.augment.kitti=flip,crop", "data.augment.svhn=[]"])).data.augment
    assert changed == {**default, "kitti": ("crop", "flip"), "svhn": ()}
    # A whole config of real data may be laid over the demo's: its usual values say nothing of the demo's tasks.
    demo = vtab_config({"data": {"source": "demo", "augment": default}}).data.augment
    assert demo == {"demo_color": ("flip",), "demo_light": (), "demo_count": ("flip",), "demo_position": ()}


def test_later_layers_win_key_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("schedule: {steps: 700}\nbatch_size: 32\noptim: {clip_norm: 2.0}\n")
    plain = resolve(
        "mine.yaml",
        from_flags({"batch_size": 16, "data.source": "x"}),
        from_settings(["optim.clip_norm=3.0"]),
    )
    built = build(VtabConfig, plain, "config")
    assert (built.schedule.steps, built.schedule.warmup, built.batch_size, built.optim.clip_norm) == (700, 56, 16, 3.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [("vtap", "did you mean 'vtab'"), ("nowhere.yaml", "no such file; shipped configs are ade20k")],
)
def test_unknown_configs_are_named(name: str, message: str) -> None:
    with pytest.raises(DpnError, match=message):
        read_config(name)


@pytest.mark.parametrize("text", ["a: [", "just words", "- 1"])
def test_files_that_are_no_config_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    with pytest.raises(DpnError, match=r"odd.yaml: (not valid YAML|a config is a mapping)"):
        read_config(str(tmp_path / "odd.yaml"))


def test_data_default_to_the_first_place_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve(None, {}, {})["data"]["source"] == "demo"
    (tmp_path / "vtab-1k").mkdir()
    assert resolve(None, {}, {})["data"]["source"] == "vtab-1k"
    (tmp_path / "data" / "vtab-1k").mkdir(parents=True)
    monkeypatch.setenv("DPN_DATA_DIR", str(tmp_path / "data"))
    assert resolve(None, {}, {})["data"]["source"] == str(tmp_path / "data" / "vtab-1k")
    assert resolve(None, {"data": {"source": "demo"}}, {})["data"]["source"] == "demo"


def test_weights_default_to_the_weights_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPN_HOME", str(tmp_path))
    real = vtab_config({"data": {"source": "somewhere"}, "backbone": {"arch": "B/32"}})
    with pytest.raises(DpnError, match=r"Ways out: --checkpoint FILE.*B-32-dpn.safetensors.*--checkpoint none"):
        finalize(real)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "B-32-dpn.npz").touch()
    assert finalize(real).backbone.checkpoint == str(tmp_path / "weights" / "B-32-dpn.npz")
    assert finalize(real).backbone.image_size == 224
    both = real.model_copy(update={"compare": ("none", "dpn")})
    with pytest.raises(DpnError, match=r"B-32-none.safetensors and B-32-dpn.safetensors"):
        finalize(both)
    (tmp_path / "weights" / "B-32-none.npz").touch()
    assert finalize(both).backbone.checkpoint == str(tmp_path / "weights" / "B-32-{stem}.npz")


@pytest.mark.parametrize(
    ("arch", "size", "steps"), [("mu/16", 64, 250), ("mu/8", 64, 250), ("B/32", 64, 25), ("H/14", 70, 25)]
)
def test_the_demo_fits_its_config_to_the_network(arch: str, size: int, steps: int) -> None:
    plain = resolve(None, {"data": {"source": "demo"}, "backbone": {"arch": arch}}, {})
    built = finalize(build(VtabConfig, plain, "config"))
    assert (built.backbone.image_size, built.backbone.checkpoint, built.schedule.steps) == (size, "none", steps)


@pytest.mark.parametrize("task", ["lit", "segment", "highres"])
def test_the_steps_of_a_command_win_over_the_epochs_of_a_file(task: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("epochs: 9\nbackbone: {arch: B/16}\ndata: {source: x}\n")
    asked: Any = str(tmp_path / "mine.yaml"), {"schedule": {"steps": 1000}}, {}
    plain = {
        "lit": lambda: lit_config.resolve(*asked),
        "segment": lambda: segment_config.resolve("segment", *asked),
        "highres": lambda: highres_config.resolve(*asked),
    }[task]()
    assert (plain["epochs"], plain["schedule"]["steps"], plain["data"]["source"]) == (None, 1000, "x")
