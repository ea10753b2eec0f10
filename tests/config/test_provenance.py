"""Where values come from: sources of configs, what `dpn configs show` prints, and how runs differ from the paper."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dpn_cli.commands.trainers import schema_of
from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import build, merge, read_config, read_document, shipped_configs
from dpn_cli.config.provenance import NOT_IN_PAPER, ValueSource, differences, flatten_keys, read_sources
from dpn_cli.run import run as sessions
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from support.cli import run_dpn
from support.pretrain import pretrain_config
from support.training import TASKS

PAPER = (
    "highres",
    "pretrain",
    "pretrain_deit",
    "pretrain_s16plus",
    "pretrain_imagenet21k",
    "pretrain_jft",
    "pretrain_cifar",
    "pretrain_sun397",
    "vtab",
    "lit",
    "ade20k",
)


def config_of(name: str, **changes: Any) -> Any:
    plain = merge(read_config(name), changes)
    if name == "pretrain":
        return pretrain_config("B/16", **changes)
    return build(schema_of(plain, name), plain, name)


def values(name: str, precision: str = "fp32", **changes: Any) -> list[str]:
    """The entries about values."""
    return [entry for entry in differences(config_of(name, **changes), precision) or () if "(paper: " in entry]


@pytest.mark.parametrize("name", list(shipped_configs()))
def test_sources_name_keys_and_are_no_keys_themselves(name: str) -> None:
    plain = read_config(name)
    assert "sources" not in plain
    assert set(read_sources(name, schema_of(plain, name))) == set(read_document(name).get("sources", {}))


@pytest.mark.parametrize("name", PAPER)
def test_every_stated_value_of_the_papers_configs_has_a_source(name: str) -> None:
    stated = {key for key, _ in flatten_keys(read_config(name)) if not key.startswith("about.")}
    assert not stated - set(read_document(name)["sources"])


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("pretrain", "backbone.drop_path_rescale"),
        ("pretrain_sun397", "backbone.drop_path_rescale"),
        ("pretrain_sun397", "batch_size"),
        ("ade20k", "head_init"),
        ("lit", "lr"),
        ("vtab", "lrs"),
        ("vtab", "backbone.image_size"),
    ],
)
def test_values_that_the_paper_does_not_state_are_marked(name: str, key: str) -> None:
    plain = read_config(name)
    assert read_sources(name, schema_of(plain, name))[key].source.startswith(NOT_IN_PAPER)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ("{lrr: App. D}", "mine.yaml: sources.lrr: not a config key; did you mean 'lr'"),
        ("{optim: App. D}", "mine.yaml: sources.optim: not a config key"),
        ("{lr: {paper: 3}}", "mine.yaml: sources.lr.source: missing"),
        ("{lr: {source: App. D, value: 3}}", "value: unknown key"),
        ("{lr: {source: 'not in the paper: why', paper: 3}}", "sources.lr: 'not in the paper' leaves no value"),
        ("{lr: 3}", "mine.yaml: sources.lr"),
        ("[lr]", "mine.yaml: sources: "),
    ],
)
def test_a_mistake_in_sources_is_one_line(sources: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"batch_size: 8\nsources: {sources}\n")
    result = run_dpn("finetune", "highres", "-c", str(tmp_path / "mine.yaml"), "--data", "imagenet", "--print-config")
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert message in line


def test_sources_of_a_config_change_nothing(tmp_path: Path) -> None:
    printed = []
    for sources in ("", "sources: {lr: {source: mine, paper: 0.5, differs: Much.}}\n"):
        (tmp_path / "mine.yaml").write_text(f"batch_size: 8\n{sources}")
        result = run_dpn(
            "finetune", "highres", "-c", str(tmp_path / "mine.yaml"), "--data", "imagenet", "--print-config"
        )
        assert result.exit_code == 0, result.output
        printed.append(result.stdout)
    assert printed[0] == printed[1]
    assert yaml.safe_load(printed[0])["batch_size"] == 8


@pytest.mark.parametrize("name", list(shipped_configs()))
def test_show_prints_values_with_sources_and_stays_a_config(name: str, tmp_path: Path) -> None:
    result = run_dpn("configs", "show", name)
    assert result.exit_code == 0, result.output
    (tmp_path / "shown.yaml").write_text(result.stdout)
    schema = schema_of(read_config(name), name)
    second = read_config(str(tmp_path / "shown.yaml"))
    assert build(schema, second, "shown") == build(schema, read_config(name), name)
    for key, source in read_sources(name, schema).items():
        own = key.rpartition(".")[2]
        assert [line for line in result.stdout.splitlines() if f"{own}:" in line and f"# {source.comment()}" in line], (
            key
        )


def test_show_prints_the_papers_value_where_it_differs() -> None:
    output = run_dpn("configs", "show", "highres").stdout.splitlines()
    lines = [" ".join(line.split()) for line in output]
    assert "state_dtype: float32 # App. D (big_vision.momentum_hp); paper: bfloat16" in lines
    assert "lr: 0.03 # App. D" in lines
    assert "eval_batch_size: 64 # default" in lines


def test_the_shown_config_can_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "shown.yaml").write_text(run_dpn("configs", "show", "vtab").stdout)
    given = run_dpn("finetune", "vtab", "--data", "x", "-c", str(tmp_path / "shown.yaml"), "--print-config")
    plain = run_dpn("finetune", "vtab", "--data", "x", "--print-config")
    assert yaml.safe_load(given.stdout) == yaml.safe_load(plain.stdout)


MOMENTS = "optim.state_dtype: float32 (paper: bfloat16)"


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("highres", [MOMENTS]),
        ("pretrain", [MOMENTS]),
        ("vtab", [MOMENTS]),
        ("pretrain_sun397", []),
        ("lit", []),
        ("ade20k", []),
    ],
)
def test_a_config_of_the_paper_differs_where_its_sources_state_it(name: str, entries: list[str]) -> None:
    assert values(name) == entries
    bf16 = "runtime.precision: bf16 (paper: fp32)"
    assert values(name, "bf16") == entries + ([bf16] if name not in ("pretrain_sun397", "lit") else [])


@pytest.mark.parametrize(
    ("name", "changes", "entry"),
    [
        ("highres", {"lr": 0.01}, "lr: 0.01 (paper: 0.03)"),
        ("highres", {"data": {"decode": "pillow"}}, "data.decode: pillow (paper: exact)"),
        ("highres", {"evaluate_every": 100}, "evaluate_every: 100 (paper: 2500)"),
        ("highres", {"data": {"eval_resize": 400}}, "data.eval_resize: 400 (paper: 418)"),
        ("highres", {"epochs": 3}, "epochs: 3.0 (paper: null)"),
        (
            "highres",
            {"backbone": {"checkpoint": "none"}},
            "backbone.checkpoint: none (paper: the network that App. C trains",
        ),
        ("vtab", {"seeds": [0]}, "seeds: [0] (paper: [0, 1, 2])"),
        ("vtab", {"optim": {"clip_norm": None}}, "optim.clip_norm: null (paper: 1.0)"),
        ("vtab", {"backbone": {"stem": "rms"}}, "backbone.stem: rms (paper: none and dpn)"),
        ("lit", {"batch_size": 64}, "batch_size: 64 (paper: 16384)"),
        ("ade20k", {"data": {"fraction": 0.3}}, "data.fraction: 0.3 (paper: 1.0)"),
        ("ade20k", {"evaluation": {"size": "resize"}}, "evaluation.size: resize (paper: native)"),
        ("ade20k", {"schedule": {"steps": 10}}, "schedule.steps: 10 (paper: 161664)"),
    ],
)
def test_a_changed_value_is_listed_with_the_papers(name: str, changes: dict[str, Any], entry: str) -> None:
    (actual,) = [item for item in values(name, **changes) if item not in values(name)]
    assert actual.startswith(entry)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("highres", {"data": {"eval_resize": 418}, "backbone": {"checkpoint": "B-32.npz", "stem": "dpn"}}),
        ("highres", {"runtime": {"workers": 3}, "eval_batch_size": 2}),
        ("vtab", {"lrs": [0.01], "backbone": {"image_size": 384}}),
        ("lit", {"lr": 0.1, "text": {"context": 32}}),
        ("ade20k", {"data": {"fraction": "1/16"}, "evaluation": {"stride": 341, "size": "native"}}),
    ],
)
def test_values_that_the_paper_has_or_does_not_state_are_not_listed(name: str, changes: dict[str, Any]) -> None:
    assert values(name, **changes) == values(name)


def test_other_epochs_stand_for_the_steps_that_follow_from_them() -> None:
    assert values("ade20k", epochs=5, schedule={"steps": 7}) == ["epochs: 5.0 (paper: null)"]
    parity: dict[str, Any] = {"optim": {"state_dtype": "bfloat16"}}
    assert values("pretrain", schedule={"warmup": 5}, **parity) == ["schedule.warmup: 5 (paper: 10000)"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("highres", ["order of a hash", "minival alone is scored", "mean of at least 3"]),
        ("pretrain", ["order of a hash", "minival alone is scored", "mean of at least 3"]),
        ("lit", ["JFT-4B"]),
        ("ade20k", ["mean of 10", "q, k and v biases"]),
    ],
)
def test_differences_that_no_value_shows_are_sentences(name: str, words: list[str]) -> None:
    sentences = [item for item in differences(config_of(name), "fp32") or () if "(paper: " not in item]
    assert all(any(word in sentence for sentence in sentences) for word in words)


@pytest.mark.parametrize("name", [name for name in shipped_configs() if name not in PAPER])
def test_demos_and_own_images_have_nothing_to_compare_with(name: str) -> None:
    assert differences(config_of(name), "fp32") is None


def test_the_papers_config_on_demo_data_is_a_demo() -> None:
    assert differences(config_of("highres", data={"source": "demo"}), "fp32") is None


def test_a_source_compares_in_one_way() -> None:
    assert ValueSource(source="x").disagrees(1, 2)
    assert not ValueSource(source="x", same=(1,)).disagrees(1, 2)
    assert not ValueSource(source="x", unlike=("none",)).disagrees("file", "a network")


# What makes a small run of a task one of the paper's.
CHANGES: dict[str, dict[str, Any]] = {
    "vtab": {},
    "highres": {},
    "pretrain": {"backbone.arch": "Ti/16", "backbone.image_size": 32},
    "lit": {},
    "segment": {"about.table": "Table 5 (App. G)"},
}
# An entry that every run of a task's test has.
EXPECTED = {
    "vtab": "seeds: [0] (paper: [0, 1, 2])",
    "highres": "evaluate_every: 2 (paper: 2500)",
    "pretrain": "optim.state_dtype: float32 (paper: bfloat16)",
    "lit": "batch_size: 4 (paper: 16384)",
    "segment": "evaluation.size: resize (paper: native)",
}


@pytest.mark.parametrize("task", CHANGES)
def test_the_result_and_the_first_lines_of_a_run_list_differences(
    task: str, digits: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Console, "info", lambda console, line: said.append(line))
    TASKS[task](digits, photos, tmp_path / "run", **CHANGES[task])()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    listed = result["differs_from_paper"]
    assert EXPECTED[task] in listed
    (line,) = [line for line in said if line.startswith("differs from the paper: ")]
    assert line.removeprefix("differs from the paper: ") == "; ".join(listed)


@pytest.mark.parametrize(
    ("precision", "device", "listed"),
    [("auto", "cuda", True), ("auto", "cpu", False), ("bf16", "cpu", True), ("fp32", "cuda", False)],
)
def test_precision_follows_the_device(
    precision: str, device: str, listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("vtab", runtime={"precision": precision})
    monkeypatch.setattr(sessions, "join", lambda name, shard=False: nullcontext(World(0, 1, torch.device(device))))
    launch = LaunchOptions(tmp_path / "run")
    with sessions.open_run(config, config.runtime, "sweep", launch, tmp_path, Console(quiet=True)) as begun:
        assert ("runtime.precision: bf16 (paper: fp32)" in (begun.differs or ())) == listed


def test_a_run_of_the_demo_reports_no_differences(tmp_path: Path) -> None:
    config = config_of("vtab_demo")
    with sessions.open_run(
        config, config.runtime, "sweep", LaunchOptions(tmp_path / "run"), tmp_path, Console(quiet=True)
    ) as begun:
        assert begun.differs is None
