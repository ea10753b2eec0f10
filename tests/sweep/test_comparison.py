"""Networks and seeds side by side: ``--compare`` and ``--seeds`` of pretrain, highres and segment."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

from dpn_cli.config.load import build, from_settings, read_config
from dpn_cli.engine import fit as engine
from dpn_cli.errors import DpnError, NonFiniteError, StoppedError
from dpn_cli.run import distributed, precision, signals
from dpn_cli.sweep.grid import SweepConfig, Trial, settings_of
from dpn_cli.sweep.pairs import build_result, print_tables
from dpn_cli.weights.backbone import export_backbone, load_backbone
from dpn_cli.weights.locate import open_checkpoint
from support.cli import run_dpn
from support.engine import fail_training
from support.images import write_class_folders
from support.segment import write_scenes
from support.vtab import vtab_config
from tasks.classify.highres_config import HighresConfig
from tasks.vtab.train import load_network

SMALL = ["--image-size", "16", "--steps", "2", "-b", "8", "-j", "0", "--device", "cpu", "-q", "--json"]
NETWORKS = "none;stem=dpn,norm=bn,placement=pre,post;arch=mu/16,stem=dpn,norm_options.eps=0.1"
NAMES = NETWORKS.split(";")


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    root = tmp_path_factory.mktemp("data")
    photos = ["--data", str(write_class_folders(root / "photos", classes=3, each=10)), "--val-fraction", "0.2"]
    scenes = str(write_scenes(root / "scenes", {"training": 8, "validation": 2}))
    new = ["--arch", "mu/8", "--checkpoint", "none", *SMALL]
    return {
        "pretrain": ["pretrain", *photos, "--augment", "none", "--arch", "mu/8", *SMALL],
        "highres": ["finetune", "highres", *photos, *new],
        "segment": ["segment", "folder", "--data", scenes, "--label-offset", "1", "--ignore-label", "0", *new],
    }


@pytest.mark.parametrize("task", ["pretrain", "highres", "segment"])
def test_each_training_is_the_one_that_it_would_be_alone(
    task: str, commands: dict[str, list[str]], tmp_path: Path, started_jobs: list[engine.TrainJob]
) -> None:
    several = [*commands[task], "--compare", NETWORKS, "--seeds", "0,2", "-o", str(tmp_path / "all")]
    completed = run_dpn(*several)
    assert completed.exit_code == 0, completed.output
    assert [job.seed for job in started_jobs] == [0, 2] * 3
    result = json.loads((tmp_path / "all" / "result.json").read_text())
    assert result == json.loads(completed.stdout)
    folders = [f"{name.replace('/', '-')}/seed{seed}" for name in NAMES for seed in (0, 2)]
    assert [folder for network in result["compare"]["networks"].values() for folder in network["runs"]] == folders
    kinds = []
    for folder in folders:
        checkpoint = open_checkpoint(str(tmp_path / "all" / folder))
        weights = load_file(tmp_path / "all" / folder / "weights.safetensors")
        patch = next(value for name, value in weights.items() if name.endswith("patch_embed.proj.weight"))
        config = yaml.safe_load((tmp_path / "all" / folder / "config.yaml").read_text())
        eps = (config["backbone"]["norm_options"] or {}).get("eps")
        kinds.append((checkpoint.stem, patch.numel() // len(patch) // 3, checkpoint.norm, checkpoint.placement, eps))
    none, mixed = ("none", 64, "ln", "pre,pre", None), ("dpn", 64, "bn", "pre,post", None)
    assert kinds[::2] == kinds[1::2] == [none, mixed, ("dpn", 256, "ln", "pre,pre", 0.1)]
    single = ["--stem", "dpn", "--norm", "bn", "--placement", "pre,post", "--seed", "2", "-o", str(tmp_path / "one")]
    assert run_dpn(*commands[task], *single).exit_code == 0
    one, two = (
        load_file(folder / "weights.safetensors") for folder in (tmp_path / "one", tmp_path / "all" / folders[3])
    )
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    count = len(started_jobs)
    second_result = run_dpn(*several, "--resume")
    assert json.loads(second_result.stdout) == result
    assert len(started_jobs) == count
    shutil.rmtree(tmp_path / "all" / folders[3])
    assert scores_of_each(json.loads(run_dpn(*several, "--resume").stdout)) == scores_of_each(result)
    assert len(started_jobs) == count + 1
    assert (tmp_path / "all" / folders[3] / "result.json").is_file()
    score = result["score"]
    for name, network in result["compare"]["networks"].items():
        assert network["network"] == settings_of(name)
        assert network[score]["values"] == pytest.approx([run[score] for run in network["runs"].values()], abs=1e-4)


def scores_of_each(result: dict[str, Any]) -> list[Any]:
    return [network[result["score"]] for network in result["compare"]["networks"].values()]


def small(*settings: str) -> HighresConfig:
    config = build(HighresConfig, {**read_config("highres_demo")}, "test")
    plain = {**config.model_dump(), **from_settings(settings)}
    return build(HighresConfig, plain, "test")


def results_of(config: SweepConfig, scores: dict[str, list[float | None]]) -> dict[str, Any]:
    runs, results, failed = [], {}, {}
    for name, item in config.by_network().items():
        for seed, score in zip(item.by_seed(), scores[name], strict=True):
            folder = f"{name}/{seed}"
            runs.append(Trial(name, seed, folder))
            if score is None:
                failed[folder] = f"{name} {seed}: broken"
            else:
                results[folder] = {"task": "highres", "top1": score}
    return build_result(["miou", "top1"], runs, results, failed, compared=True)


def test_differences_pair_trials_of_the_same_seed() -> None:
    config = small("compare=[none, dpn, rms]", "seeds=[0, 1, 5]")
    scores: dict[str, list[float | None]] = {"none": [50.0, 60.0, 70.0], "dpn": [51.0, 63.0, 75.0], "rms": [None] * 3}
    result = results_of(config, scores)
    networks, (dual, other) = result["compare"]["networks"], result["compare"]["differences"]
    none = networks["none"]["top1"]
    assert (none["mean"], none["std"], none["n"]) == (60.0, 10.0, 3)
    assert (dual["network"], dual["minus"], dual["seeds"]) == ("dpn", "none", [0, 1, 5])
    # Of 1, 3 and 5: mean 3, deviation 2, and 4.3027 is Student's quantile of two degrees of freedom.
    assert dual["top1"]["mean"] == 3.0
    assert dual["top1"]["stderr"] == pytest.approx(2 / math.sqrt(3), abs=1e-4)
    reach = 4.30265 * 2 / math.sqrt(3)
    assert dual["top1"]["ci95"] == pytest.approx([3 - reach, 3 + reach], abs=1e-3)
    assert networks["rms"]["top1"] is None
    assert other["top1"] is None
    assert result["failed"] == [f"rms {seed}: broken" for seed in (0, 1, 5)]
    # A seed that failed is no pair.
    partial = results_of(config, {**scores, "dpn": [51.0, None, 75.0], "rms": [40.0] * 3})
    assert partial["compare"]["differences"][0]["seeds"] == [0, 5]
    assert partial["compare"]["differences"][0]["top1"]["values"] == [1.0, 5.0]


def test_a_stopped_comparison_continues(
    commands: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started_jobs: list[engine.TrainJob]
) -> None:
    command = [*commands["highres"], "--compare", "none,dpn", "--seeds", "2", "-o", str(tmp_path / "all")]
    with pytest.MonkeyPatch.context() as patch:
        fail_training(3, StoppedError(signal.SIGTERM), patch)
        completed = run_dpn(*command)
    assert completed.exit_code == 75
    assert "run the same command with --resume" in completed.stderr
    assert json.loads((tmp_path / "all" / "run.json").read_text())["status"] == "stopped"
    assert len(started_jobs) == 2
    result = run_dpn(*command[:-5], "none,rms", *command[-4:], "--resume")
    assert result.exit_code == 2
    assert "different config (compare: " in result.stderr
    assert run_dpn(*command, "--resume").exit_code == 0
    assert len(started_jobs) == 4
    assert "holds a finished run" in run_dpn(*command).stderr
    assert run_dpn(*command, "--overwrite").exit_code == 0
    assert len(started_jobs) == 8


def test_data_that_change_between_two_trainings_are_noticed(tmp_path: Path) -> None:
    photos = write_class_folders(tmp_path / "photos", classes=2, each=10)
    command = ["finetune", "highres", "--data", str(photos), "--val-fraction", "0.2", "--arch", "mu/8", "--checkpoint",
               "none", *SMALL, "--compare", "none,dpn", "-o", str(tmp_path / "all")]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        fail_training(2, StoppedError(signal.SIGTERM), patch)
        run_dpn(*command)
    shutil.rmtree(tmp_path / "all" / "dpn")
    (photos / "class0" / "000.jpg").unlink()
    result = run_dpn(*command, "--resume")
    assert result.exit_code == 3
    assert "the data have changed since this comparison started" in result.stderr


@pytest.mark.parametrize("several", [[], ["--seeds", "2"], ["--compare", "none,dpn"]])
def test_a_run_continues_with_the_weights_that_it_found(
    several: list[str], commands: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dpn looks for weights in the home folder, where others may lie when the run is resumed."""
    out = tmp_path / "run"
    words = [word for word in commands["highres"] if word not in ("--checkpoint", "none", "-q")]
    command = [*words, *several, "-o", str(out), "--resume"]
    for home, code in (("old", 75 if several else 0), ("new", 0)):
        monkeypatch.setenv("DPN_HOME", str(tmp_path / home))
        (tmp_path / home / "weights").mkdir(parents=True)
        for stem in ("none", "dpn"):
            file = tmp_path / home / "weights" / f"mu-8-{stem}.safetensors"
            export_backbone(load_backbone("mu/8", stem=stem, image_size=16, seed=int(home == "new")), file)
        with pytest.MonkeyPatch.context() as patch:
            fail_training(2 if home == "old" else 0, StoppedError(signal.SIGTERM), patch)
            completed = run_dpn(*command)
        assert completed.exit_code == code, completed.stderr
    assert "continues with --checkpoint" in completed.stderr
    used = [yaml.safe_load(file.read_text())["backbone"]["checkpoint"] for file in out.rglob("config.yaml")]
    assert all(str(tmp_path / "old") in name for name in used if name)
    assert len(used) == 1 + 2 * bool(several)
    result = run_dpn(*command, "--checkpoint", str(tmp_path / "new" / "weights" / "mu-8-dpn.safetensors"))
    assert result.exit_code == 2
    assert "different config (backbone.checkpoint: " in result.stderr


def test_a_run_that_has_not_started_uses_the_current_weights(
    commands: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word for word in commands["highres"] if word not in ("--checkpoint", "none", "-q")]
    photos = tmp_path / "photos"
    photos.mkdir()  # without images the run ends after it has its folder
    words[words.index("--data") + 1] = str(photos)
    for home, code in (("old", 3), ("new", 0)):
        monkeypatch.setenv("DPN_HOME", str(tmp_path / home))
        file = tmp_path / home / "weights" / "mu-8-dpn.safetensors"
        file.parent.mkdir(parents=True)
        export_backbone(load_backbone("mu/8", image_size=16, seed=0), file)
        result = run_dpn(*words, "-o", str(tmp_path / "run"), "--resume")
        assert result.exit_code == code, result.stderr
        if code:
            write_class_folders(photos, classes=2, each=10)
            assert str(file) in (tmp_path / "run" / "config.yaml").read_text()
    assert "continues with" not in result.stderr
    assert str(file) in (tmp_path / "run" / "config.yaml").read_text()


def test_weights_that_change_between_two_trainings_are_noticed(commands: dict[str, list[str]], tmp_path: Path) -> None:
    weights = tmp_path / "tower.safetensors"
    words = [word for word in commands["highres"] if word not in ("--arch", "mu/8", "--checkpoint", "none")]
    command = [*words, "--checkpoint", str(weights), "--seeds", "2", "-o", str(tmp_path / "all")]
    for seed, code in ((0, 75), (1, 3)):
        export_backbone(load_backbone("mu/8", image_size=16, seed=seed), weights)
        with pytest.MonkeyPatch.context() as patch:
            fail_training(2, StoppedError(signal.SIGTERM), patch)
            result = run_dpn(*command, "--resume")
        assert result.exit_code == code
    assert "stem dpn: the weights have changed since this comparison started" in result.stderr


def test_failed_trials_are_named_and_the_others_continue(
    commands: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started_jobs: list[engine.TrainJob]
) -> None:
    words = [word for word in commands["pretrain"] if word != "--json"]
    command = [*words, "--compare", "none,dpn", "--seeds", "2", "-o", str(tmp_path / "all")]
    with pytest.MonkeyPatch.context() as patch:
        fail_training(2, NonFiniteError("the loss is NaN"), patch)
        completed = run_dpn(*command)
    assert completed.exit_code == 6
    assert "failed: stem none, seed 1: the loss is NaN" in completed.stdout
    assert "1 training failed" in completed.stderr
    assert not (tmp_path / "all" / "result.json").exists()
    partial = json.loads((tmp_path / "all" / "partial.json").read_text())
    assert partial["compare"]["differences"][0]["seeds"] == [0]
    assert len(started_jobs) == 3
    completed = run_dpn(*command, "--resume")
    assert completed.exit_code == 0, completed.output
    assert len(started_jobs) == 4
    assert not (tmp_path / "all" / "partial.json").exists()
    result = json.loads((tmp_path / "all" / "result.json").read_text())
    assert (result["failed"], result["compare"]["differences"][0]["seeds"]) == ([], [0, 1])
    assert "top-1 in %, and the difference to none, paired by seed" in " ".join(completed.stdout.split())


def test_seeds_alone_give_mean_and_deviation(
    commands: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    completed = run_dpn(*commands["highres"], "--seeds", "2")
    result = json.loads(completed.stdout)
    (network,) = result["compare"]["networks"].items()
    assert network[0] == "dpn"
    assert list(network[1]["runs"]) == ["seed0", "seed1"]
    assert result["compare"]["differences"] == []
    assert (tmp_path / "runs" / "highres" / "mu-8-dpn-2-seeds" / "seed1" / "result.json").is_file()


def test_the_folder_is_named_after_the_networks_and_holds_no_network_itself(
    commands: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [*commands["segment"], "--compare", "none,dpn"]
    tried = run_dpn(*command, "--dry-run")
    assert tried.exit_code == 0, tried.output
    assert not (tmp_path / "runs").exists()
    assert run_dpn(*command).exit_code == 0
    folder = Path("runs/segment_folder/mu-8-none-vs-dpn")
    assert (folder / "none" / "seed0" / "weights.safetensors").is_file()
    result = run_dpn("segment", "eval", str(folder))
    assert result.exit_code == 3
    assert "a comparison of several trainings: each of them has a folder below it" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare", "dpn"], "--compare: needs two stems or more, e.g. none,dpn, or networks, e.g. '"),
        (["--compare", "none;stem=dpm"], "--compare: 'stem=dpm': stem: one of none, pre, .*; did you mean 'dpn'"),
        (["--compare", "none;norm=dtn"], "norm=dtn: .*class token"),
        (["--compare", "none;stm=dpn"], "--compare: 'stm=dpn': stm is no key; use arch, stem, .*did you mean 'stem'"),
        (["--compare", "none;dpn,drop_path=2"], "drop_path: a number of at least 0 and below 1"),
        (["--compare", "none;stem=none"], "--compare: every value may be given once"),
        (["--compare", "none;stem=dpn,stem=rms"], "'stem=dpn,stem=rms': stem is given twice"),
        (["--compare", "none;"], "write KEY=VALUE"),
        (["--compare", "none;image_size=20"], "the patch 8x8 does not divide it"),
        (["--compare", "checkpoint=x.npz;checkpoint=none"], "x.npz: no such file"),
        (["--seeds", "2", "--seed", "3"], "--seeds: --seed 3 is given too; give one of them"),
        (["--checkpoint", "w-{stem}.npz"], r"\{stem\} is the stem of each network of --compare"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, commands: dict[str, list[str]], tmp_path: Path, started_jobs: list[engine.TrainJob]
) -> None:
    result = run_dpn(*commands["highres"], *words, "-o", str(tmp_path / "all"))
    assert result.exit_code in (2, 3)
    (line,) = result.stderr.strip().splitlines()
    assert re.search(message, line), line
    assert not started_jobs


def test_a_value_may_hold_commas_and_checkpoints_are_named_by_any_key() -> None:
    assert settings_of("stem=none,placement=pre,post, norm=ln") == {
        "stem": "none",
        "placement": "pre,post",
        "norm": "ln",
    }
    config = small("compare=['none,arch=B/16', 'stem=dpn,arch=Ti/16,checkpoint=own.npz']")
    config = config.model_copy(
        update={"backbone": config.backbone.model_copy(update={"checkpoint": "w/{arch}-{stem}.npz"})}
    )
    networks = [item.backbone.checkpoint for item in config.by_network().values()]
    assert networks == ["w/B-16-none.npz", "own.npz"]
    assert config.unused_checkpoint_warning() is None
    own = small("compare=['checkpoint=a', 'checkpoint=b']", "backbone.checkpoint=x")
    assert own.unused_checkpoint_warning() == (
        "--checkpoint x: not used, because every network of --compare has a checkpoint of its own"
    )
    assert (
        small("compare=['checkpoint=a', 'checkpoint=b']", "backbone.checkpoint=none").unused_checkpoint_warning()
        is None
    )
    twins = small("compare=['checkpoint=a/b', 'checkpoint=a-b']")
    assert len(set(twins.folders.values())) == 2
    with pytest.raises(DpnError, match=r"compare: 'image_size=512': data.eval_resize"):
        small("compare=['image_size=512', none]", "data.eval_resize=384").by_network()


def test_networks_of_vtab_differ_in_any_key() -> None:
    config = vtab_config({"compare": "none,arch=mu/8;arch=mu/16", "backbone": {"checkpoint": "none", "image_size": 16}})
    built = [load_network(config, name, 3).config for name in config.networks]
    assert [(config.stem, config.patch[0]) for config in built] == [("none", 8), ("dpn", 16)]


def test_a_signal_inside_one_training_stops_them_all() -> None:
    with signals.listen():
        with signals.listen():
            signal.raise_signal(signal.SIGUSR1)
        assert signals.requested_signal() == signal.SIGUSR1
    assert signals.requested_signal() is None


def test_a_training_inside_a_comparison_uses_the_ranks_that_have_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with distributed.join("cpu") as world:
            assert (world.rank, world.size) == (1, 2)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_comparison_logs_every_score_and_says_what_one_seed_shows(
    commands: dict[str, list[str]], tmp_path: Path
) -> None:
    spoken = [word for word in commands["highres"] if word not in ("-q", "--json")]
    completed = run_dpn(*spoken, "--compare", "none,dpn", "--no-report", "-o", str(tmp_path / "one"))
    assert completed.exit_code == 0, completed.output
    scores = re.findall(r"^stem (none|dpn), seed 0: top-1 ([\d.]+) %$", completed.stderr, re.MULTILINE)
    result = json.loads((tmp_path / "one/result.json").read_text())["compare"]["networks"]
    assert scores == [(name, f"{result[name]['top1']['mean']:.2f}") for name in ("none", "dpn")]
    assert "Each network has one seed" in " ".join(completed.stdout.split())


def test_trainings_of_two_precisions_are_warned_of(
    commands: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "has_bf16_products", lambda: True)
    monkeypatch.setattr(precision, "LEAST_WIDTH", 64)
    command = [*commands["highres"], "--compare", "arch=mu/8;arch=nano/8", "-o"]
    mixed = run_dpn(*command, str(tmp_path / "mixed"))
    warning = "trainings were computed in bf16 and in fp32, by their machines or widths; --precision sets one for all"
    assert warning in " ".join(mixed.stderr.split())
    assert {json.loads(path.read_text())["precision"] for path in (tmp_path / "mixed").rglob("seed0/result.json")} == {
        "bf16", "fp32",
    }  # fmt: skip
    assert warning not in " ".join(run_dpn(*command, str(tmp_path / "one"), "--precision", "fp32").stderr.split())


def test_two_seeds_are_no_single_one(capsys: pytest.CaptureFixture[str]) -> None:
    config = small("compare=[none, dpn]", "seeds=[0, 1]")
    print_tables(results_of(config, {"none": [50.0, 60.0], "dpn": [51.0, 63.0]}))
    assert "one seed" not in capsys.readouterr().out
