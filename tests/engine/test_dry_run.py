"""Dry runs: what they measure of a training, that they notice a resume that goes wrong, and that nothing stays."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpn_cli.commands import estimate
from dpn_cli.config.cost import Cost, total_disk, total_hours
from dpn_cli.config.schema import Optim
from dpn_cli.engine import dry_run
from dpn_cli.engine import fit as engine
from dpn_cli.engine import state as train_state
from dpn_cli.engine.dry_run import DryRunSetup, Sampled, distances, dry_run_fit
from dpn_cli.errors import DpnError, SaveError, StoppedError
from dpn_cli.run import cores as processor
from dpn_cli.run import signals
from dpn_cli.run.checkpoints import Checkpoints, State
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from support.cli import run_dpn
from support.distill import write_teacher
from support.engine import loss_fn, make_job, random_batches, small_vit
from support.images import write_class_folders
from support.ranks import run_distributed
from tasks.classify import dry_run as classify
from tasks.vtab.dry_run import sweep_cost
from tasks.vtab.tasks import TASKS

ADAM = Optim(name="adam")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still unless something is added to its `now`."""
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(dry_run, "time", clock)
    return clock


def scene(**fields: Any) -> DryRunSetup:
    workers, sampled = fields.pop("workers", 0), fields.pop("sampled", Sampled(1, lambda: None))
    return DryRunSetup(small_vit(), make_job(**{"steps": 100, "optim": ADAM, **fields}), sampled, workers)


def lasting(clock: SimpleNamespace, workers: int) -> DryRunSetup:
    """A training whose steps take 2 s, batches 5 s, and evaluations of 4 images 7 s, of which 6 s are loading."""

    def batches(start: int) -> Generator[engine.Batch, None, None]:
        for batch in random_batches()(start):
            clock.now += 5
            yield batch

    def loss(model: nn.Module, batch: engine.Batch) -> Tensor:
        clock.now += 2
        return loss_fn(model, batch)

    def passing(seconds: float) -> Callable[[], None]:
        return lambda: setattr(clock, "now", clock.now + seconds)

    sampled = Sampled(4, passing(7), passing(6), during=40, end=400)
    return scene(batches=batches, loss_fn=loss, sampled=sampled, workers=workers, evaluate_every=30)


@pytest.mark.parametrize(("workers", "step", "image"), [(0, 2 + 5, 7 / 4), (2, 5 / 2, 3 / 4), (10, 2, 1 / 4)])
def test_hours_count_steps_and_evaluations(
    workers: int, step: float, image: float, clock: SimpleNamespace, tmp_path: Path
) -> None:
    cost = dry_run_fit(lambda: lasting(clock, workers), "mu/8 dpn", tmp_path / "run", weights=1000)
    assert (cost.name, cost.trainings, cost.steps, cost.kept) == ("mu/8 dpn", 1, 100, 1000)
    assert cost.step_seconds == pytest.approx(step)
    assert cost.evaluation_seconds == pytest.approx(image * (4 * 40 + 400))  # after steps 30, 60, 90 and 100
    assert cost.hours == pytest.approx((100 * step + cost.evaluation_seconds) / 3600)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("more", "states"), [({}, 3), ({"evaluate_every": 30}, 5)])
def test_the_estimated_states_on_disk_match_a_training(more: dict[str, int], states: int, tmp_path: Path) -> None:
    outputs = engine.Outputs(Checkpoints(tmp_path / "real"))
    engine.fit(
        small_vit(),
        make_job(steps=2, optim=ADAM, evaluate_every=2, evaluate=lambda: {"accuracy": 1.0}, outputs=outputs),
    )
    one = sum(file.stat().st_size for file in (tmp_path / "real" / "last").iterdir())
    cost = dry_run_fit(lambda: scene(**more), "mu/8", tmp_path / "run", weights=0)
    assert cost.passing == pytest.approx(states * one, rel=0.01)
    parameters = sum(parameter.numel() for parameter in small_vit().parameters())
    assert one == pytest.approx(3 * 4 * parameters, rel=0.15)  # weights and Adam's two sums
    # Weights, gradients, Adam's two sums and what autograd keeps are a part of what is resident.
    assert cost.memory > 4 * 4 * parameters


def test_the_peak_of_memory_is_the_peak_of_the_resident_set() -> None:
    cpu = torch.device("cpu")
    large = torch.ones(50_000_000)
    dry_run._forget_peak(cpu)
    held = dry_run._peak(cpu)
    del large
    dry_run._forget_peak(cpu)
    assert held - dry_run._peak(cpu) > 150_000_000


Change = Callable[[dict[str, Tensor]], object]


def zero(part: str) -> Change:
    return lambda tensors: [value.zero_() for name, value in tensors.items() if name.endswith(part)]


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize("where", ["save", "load"])
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (zero("exp_avg"), "optim.exp_avg by "),
        (zero("head.weight"), "model by "),
        (without("model.head.bias"), "what was saved does not fit the training"),
        (without("optim.0.exp_avg_sq"), "what was saved does not fit the training|optim.exp_avg_sq by inf"),
        (zero("blocks.0.mlp.fc1.bias"), "model by "),
    ],
)
def test_a_broken_save_or_load_is_noticed(
    where: str, broken: Change, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, load = Checkpoints.save, Checkpoints.load

    def bad_save(self: Checkpoints, name: str, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        copies = {key: value.clone() for key, value in tensors.items()}
        broken(copies)
        save(self, name, copies, state)

    def bad_load(self: Checkpoints, name: str, *arguments: Any) -> State | None:
        actual = load(self, name, *arguments)
        if actual and name == "last.previous":
            broken(actual[0])
        return actual

    monkeypatch.setattr(Checkpoints, where, {"save": bad_save, "load": bad_load}[where])
    with pytest.raises(SaveError, match=f"would not continue as the uninterrupted one; .*({message})") as raised:
        dry_run_fit(scene, "mu/8", tmp_path / "run", weights=0)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_resume_that_restores_less_than_all_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights_only(network: nn.Module, optimizer: Any, ema: Any, tensors: Any, at: Any) -> None:
        fresh = optimizer.state_dict()
        train_state.restore(network, optimizer, ema, tensors, at)
        optimizer.load_state_dict(fresh)

    monkeypatch.setattr("dpn_cli.engine.fit.restore", weights_only)
    with pytest.raises(SaveError, match=r"optim\.exp_avg by .*of a step"):
        dry_run_fit(scene, "mu/8", tmp_path / "run", weights=0)


def test_errors_of_the_training_itself_are_unchanged(tmp_path: Path) -> None:
    def refusing(model: nn.Module, batch: engine.Batch) -> Tensor:
        raise RuntimeError("another mistake")

    with pytest.raises(RuntimeError, match="another mistake"):
        dry_run_fit(lambda: scene(loss_fn=refusing), "mu/8", tmp_path / "run", weights=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "number", "message"),
    [
        ("dpn_cli.run.checkpoints.save_file", 28, "last: not written"),
        ("dpn_cli.engine.dry_run.tempfile.mkdtemp", 30, "nothing can be written to .*; pass another"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_an_error(
    place: str, number: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(place, refuse)
    with pytest.raises(DpnError, match=message):
        dry_run_fit(scene, "mu/8", tmp_path / "run", weights=0)
    assert list(tmp_path.iterdir()) == []


def test_distances_are_in_steps_and_by_part() -> None:
    original = {"model.a": torch.zeros(2), "model.b": torch.zeros(1), "optim.0.step": torch.tensor(3.0)}
    last = {"model.a": torch.tensor([3.0, 0.0]), "model.b": torch.tensor([4.0]), "optim.0.step": torch.tensor(4.0)}
    assert distances(original, last, last) == {}
    assert distances(original, last, {**last, "model.b": torch.tensor([5.0])}) == {"model": pytest.approx(1 / 5)}
    assert distances(original, last, {**last, "optim.0.step": torch.tensor(1.0)}) == {"optim.step": pytest.approx(3.0)}
    assert distances(original, last, {**last, "ema.a": torch.zeros(2)}) == {"ema": torch.inf}
    assert distances(last, last, {**last, "model.a": torch.zeros(2)}) == {"model": torch.inf}


def cost(**fields: Any) -> Cost:
    own: dict[str, Any] = {
        "name": "B/32 dpn", "memory": 3 * 10**9, "step_seconds": 0.5, "steps": 7200, "trainings": 2,
        "evaluation_seconds": 1800.0, "kept": 4 * 10**8, "passing": 10**9, "cached": 10**7,
    }  # fmt: skip
    return Cost(**{**own, **fields})


def test_costs_add_up() -> None:
    one = cost()
    assert one.hours == 1.5
    assert one.disk == 1_410_000_000
    assert one.times(3).hours == 4.5
    assert one.times(3).disk == 3 * 4 * 10**8 + 10**9 + 10**7
    assert (one.of_steps(3600, 5).hours, one.of_steps(3600, 5).trainings) == (0.75, 10)
    two = [one, cost(name="B/32 none", passing=2 * 10**9)]
    assert total_hours(two) == 3.0
    assert total_disk(two) == 2 * 4 * 10**8 + 2 * 10**9 + 2 * 10**7  # one training ends before the next one


def test_the_table_has_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    large = {"memory": 79 * 10**9, "steps": 1_234_567, "step_seconds": 0.123456, "kept": 10**12, "trainings": 228}
    estimate.print_costs([cost(), cost(name="stem=dpn,norm=bn,placement=pre,post", part="stem alone", **large)])
    head, first, *second = capsys.readouterr().out.splitlines()
    assert head.split() == ["network", "memory", "s/step", "steps", "runs", "hours", "no", "step", "disk"]
    assert first.split() == ["B/32", "dpn", "3.0", "GB", "0.5", "7,200", "2", "1.5", "33%", "1.4", "GB"]
    assert [line.split()[0] for line in second] == ["stem=dpn,norm=bn,", "placement=pre,post,", "stem"]
    assert max(map(len, [head, first, *second])) <= 80


@pytest.mark.parametrize(("free", "held"), [(1_410_000_000, 0), (1_000_000_000, 410_000_000), (1_409_000_000, 999_999)])
def test_a_disk_that_is_too_small_is_refused(
    free: int, held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the folder holds already, as before a resume, need not be free."""
    monkeypatch.setattr(estimate, "disk_free_and_used", lambda folder: (free, held))
    if free + held >= 1_410_000_000:
        estimate.show_costs([cost()], tmp_path, Console(), as_json=False)
        assert "2 trainings in about 1.5 hours" in " ".join(capsys.readouterr().err.split())
        return
    message = "the trainings need 1.4 GB, at most 400 MB of weights, 1.0 GB of states of a training, 10 MB of caches"
    with pytest.raises(SaveError, match=message):
        estimate.show_costs([cost()], tmp_path, Console(), as_json=False)


def test_free_space_is_measured_at_the_nearest_existing_folder(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "state").write_bytes(bytes(1000))
    assert estimate.disk_free_and_used(tmp_path / "run")[1] == 1000
    free, held = estimate.disk_free_and_used(tmp_path / "new" / "run")
    assert held == 0
    assert free > 0


# Every command that trains, on images or built-in scenes, with a network that is small.
SMALL = ["--image-size", "16", "-b", "8", "-j", "0", "--device", "cpu"]
NEW = ["--arch", "mu/8", "--checkpoint", "none", *SMALL]
OWN = ["--data", "PHOTOS", "--val-fraction", "0.2"]
TRAININGS = {
    "highres": ["finetune", "highres", *OWN, *NEW, "--steps", "40"],
    "distill": ["distill", "--teacher", "TEACHER", "--data", "PHOTOS", *SMALL, "--steps", "40", "--stem-share", "0.25"],
    "lit": ["lit", "train", "--data", "demo", *NEW, "--steps", "40"],
    "lit uncached": ["lit", "train", "--data", "demo", *NEW, "--steps", "40", "--no-cache"],
    "segment": ["segment", "ade20k", "--data", "demo", *NEW, "--steps", "40"],
    "vtab": [
        "finetune",
        "vtab",
        "--data",
        "demo",
        "--tasks",
        "demo_color",
        *NEW,
        "--steps",
        "10",
        "--seeds",
        "2",
        "--lrs",
        "1e-3,1e-2",
        "--set",
        "schedule.warmup=0",
    ],
    "pretrain": ["pretrain", *OWN, "--augment", "none", "--arch", "mu/8", *SMALL, "--steps", "40"],
}


def words_of(task: str, folder: Path) -> list[str]:
    photos, teacher = folder / "photos", folder / "teacher.safetensors"
    if not photos.is_dir():
        write_class_folders(photos, classes=3, each=10)
        write_teacher(teacher)
    return [{"PHOTOS": str(photos), "TEACHER": str(teacher)}.get(word, word) for word in TRAININGS[task]]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def _few_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    for task in ("lit.data", "segment.pairs"):
        monkeypatch.setattr(f"tasks.{task}.DEMO_SPLITS", {"train": (0, 60), "val": (900, 930)})


@pytest.mark.usefixtures("_few_scenes")
@pytest.mark.parametrize("task", TRAININGS)
def test_every_training_is_rehearsed_and_nothing_stays(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, place = words_of(task, tmp_path), tmp_path / "there"
    place.mkdir()
    monkeypatch.chdir(place)
    result = run_dpn(*words, "--dry-run", "--json", "-q", "-o", "runs/run")
    assert result.exit_code == 0, result.output
    output = json.loads(result.stdout)
    for one in output["networks"]:
        no_step = one["evaluation_seconds"] + one["cache_seconds"]
        assert one["hours"] == pytest.approx((one["steps"] * one["step_seconds"] + no_step) / 3600)
        assert bool(one["cached"]) == bool(one["cache_seconds"]) == (task == "lit")
        assert min(one["memory"], one["step_seconds"], one["evaluation_seconds"], one["passing"]) > 0
    assert sum(network["steps"] for network in output["networks"]) == 40
    assert output["hours"] == pytest.approx(sum(one["hours"] for one in output["networks"]))
    assert "passed: 1 training" in result.stderr or result.stderr == ""
    assert list(place.iterdir()) == []


@pytest.mark.usefixtures("_few_scenes")
@pytest.mark.parametrize("task", [task for task in TRAININGS if task != "lit uncached"])
def test_every_training_notices_that_it_could_not_be_resumed(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Checkpoints.save

    def forgetful(self: Checkpoints, name: str, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        save(self, name, {key: value * (not key.startswith("optim")) for key, value in tensors.items()}, state)

    monkeypatch.setattr(Checkpoints, "save", forgetful)
    result = run_dpn(*words_of(task, tmp_path), "--dry-run", "-q", "-o", str(tmp_path / "run"))
    assert result.exit_code == SaveError.exit_code
    assert "would not continue as the uninterrupted one" in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "run").exists()


def test_a_row_for_every_network_of_a_comparison_and_none_for_a_seed(tmp_path: Path) -> None:
    words = [*words_of("highres", tmp_path), "--compare", "none;arch=mu/16,stem=dpn", "--seeds", "3", "--dry-run"]
    result = run_dpn(*words, "-o", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    rows = result.stdout.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["none", "arch=mu/16,stem=dpn"]
    assert [row.split()[-6:-4] for row in rows] == [["120", "3"]] * 2
    assert "dry run passed: 6 trainings" in " ".join(result.stderr.split())


def test_a_run_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    words = [*words_of("highres", tmp_path), "-o", str(tmp_path / "run"), "-q"]
    assert run_dpn(*words, "--steps", "2", "--no-report").exit_code == 0
    initial = contents(tmp_path)
    for more in ([], ["--resume"], ["--overwrite"]):
        assert run_dpn(*words, "--dry-run", *more).exit_code == 0
    assert contents(tmp_path) == initial


def test_a_signal_ends_a_dry_run_that_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "requested_signal", lambda: 15)
    result = run_dpn(*words_of("highres", tmp_path), "--dry-run", "-q", "-o", str(tmp_path / "run"))
    assert result.exit_code == StoppedError(15).exit_code
    assert "stopped by SIGTERM; a dry run keeps nothing" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "teacher.safetensors"]


def of_two_ranks(world: World, folder: Path) -> None:
    os.environ.update(WORLD_SIZE=str(world.size), RANK=str(world.rank))  # as torchrun sets them
    for more in ([], ["--shard"]):
        result = run_dpn(*words_of("highres", folder), *more, "--dry-run", "--json", "-q", "-o", str(folder / "run"))
        assert result.exit_code == 0, result.output
        assert bool(result.stdout) == world.leads
        if world.leads:
            (one,) = json.loads(result.stdout)["networks"]
            assert one["steps"] == 40
        assert not (folder / "run").exists()


@pytest.mark.slow
def test_two_ranks_rehearse_together_whole_and_in_parts(tmp_path: Path) -> None:
    words_of("highres", tmp_path)
    run_distributed(of_two_ranks, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("store")) == [
        "photos",
        "teacher.safetensors",
    ]


def test_all_trainings_of_a_sweep_count(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write_class_folders(tmp_path / "photos" / split, classes=2, each=8)
    grid = {"grid": {"lr": [1e-3, 2e-3, 3e-3]}}
    stages = json.dumps([{"epochs": 1, **grid}, {"epochs": 3}])
    words = ["--data", str(tmp_path / "photos"), "--arch", "mu/8", "--image-size", "16", "-b", "8", "-j", "0"]
    result = run_dpn("pretrain", "sun397", *words, "--set", f"stages={stages}", "--dry-run", "--json", "-q")
    assert result.exit_code == 0, result.output
    (one,) = json.loads(result.stdout)["networks"]
    assert (one["steps"], one["trainings"]) == (3 * 2 + 3 * 2, 4)


@pytest.mark.parametrize(
    ("protocol", "keep", "trainings", "kept", "passing"),
    [("paper", "none", 2 * 6, 0, 6), ("paper", "chosen", 2 * 6, 2 * 3, 6), ("vtab", "all", 2 * 9, 2 * 9, 9)],
)
def test_a_sweep_takes_all_its_trainings_and_scores_each_test_split_once_a_seed(
    protocol: str, keep: str, trainings: int, kept: int, passing: int
) -> None:
    config: Any = SimpleNamespace(seeds=(0, 1, 2), lrs=(0.1, 0.2), protocol=protocol, keep_weights=keep)
    tasks = [task for task in TASKS if task.name in ("dtd", "svhn")]
    one = cost(steps=100, trainings=1, evaluation_seconds=0.5, kept=1000, passing=70)
    actual = sweep_cost(config, one, tasks)
    assert (actual.trainings, actual.steps, actual.step_seconds) == (trainings, 100 * trainings, 0.5)
    assert actual.evaluation_seconds == 0.5 * (200 * trainings + 2 * 1000 + 3 * (1_880 + 26_032))
    assert (actual.kept, actual.passing) == (1000 * kept, 70 + 1000 * passing)


def test_two_stages_of_a_distillation_are_two_rows(tmp_path: Path) -> None:
    result = run_dpn(*words_of("distill", tmp_path), "--dry-run", "--json", "-q")
    stem, every = json.loads(result.stdout)["networks"]
    assert [(one["part"], one["steps"]) for one in (stem, every)] == [("stem weights", 10), ("all weights", 30)]
    assert stem["kept"] == 0 < every["kept"]
    assert stem["passing"] < every["passing"]  # the optimizer has no state of what is frozen


def test_a_classifier_is_evaluated_on_minival_on_the_way_and_on_validation_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[Sampled] = []

    def rehearsed(begin: Callable[[], DryRunSetup], *_: object, **arguments: object) -> Cost:
        observed.append(begin().sampled)
        return cost()

    monkeypatch.setattr(classify, "dry_run_fit", rehearsed)
    assert run_dpn(*words_of("highres", tmp_path), "--dry-run", "-q", "--set", "data.minival=0.25").exit_code == 0
    (sampled,) = observed
    assert sampled.end == 6  # a fifth of 30 images
    assert sampled.during == sampled.images == 6  # a quarter of the others


@pytest.mark.parametrize(("used", "busy"), [(0.1, False), (0.9, True)])
def test_a_busy_machine_is_named(used: float, busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(dry_run, "print_message", messages.append)
    monkeypatch.setattr(dry_run, "other_programs_seconds", lambda: 50.0 + 10.0 * used)
    dry_run._describe_load(10.0, 50.0)
    assert any("the machine is busy: other programs use 0.9 of" in message for message in messages) is busy


def test_the_time_of_other_programs_is_that_of_this_process_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = "cpu 9 9 9 9\ncpu0 100 10 40 7000 5 5 5\ncpu1 300 0 50 7000\ncpu10 1000 0 0 0\nintr 5\n"
    (tmp_path / "stat").write_text(stat)
    monkeypatch.setattr(processor, "CLOCKS", tmp_path / "stat")
    monkeypatch.setattr(processor, "cores", lambda: [0, 1])
    monkeypatch.setattr(processor, "time", SimpleNamespace(process_time=lambda: 2.0))
    assert processor.other_programs_seconds() == 500 / os.sysconf("SC_CLK_TCK") - 2
    (tmp_path / "stat").unlink()
    assert processor.other_programs_seconds() is None
