"""`dpn distill`: what the student begins with, what it learns from, its stages, and the file that is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import ExifTags, Image
from safetensors.torch import load_file
from torch import Tensor

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import build
from dpn_cli.data.loader import crop_batches
from dpn_cli.engine import fit as engine
from dpn_cli.errors import StoppedError
from dpn_cli.report.reading import read_run
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import World
from dpn_cli.weights.backbone import load_backbone
from support.cli import run_dpn
from support.distill import CLASSES, SMALL, distill_config, train_distill, write_teacher
from support.images import write_class_folders
from support.ranks import run_distributed
from tasks.classify import page
from tasks.classify.calibration import read_predictions
from tasks.classify.classifier import load_classifier
from tasks.classify.distill import command
from tasks.classify.distill import train as training
from tasks.classify.distill.config import DistillConfig, finalize, resolve
from tasks.classify.fewshot import final_probe_options


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher") / "teacher.safetensors")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty images for training, and six labelled ones of the teacher's classes."""
    root = tmp_path_factory.mktemp("photos")
    write_class_folders(root / "train", classes=3, each=20)
    write_class_folders(root / "val", classes=3, each=2)
    return root


@pytest.fixture(scope="module")
def finished(photos: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("run") / "run"
    return path, train_distill(distill_config(photos, teacher), path)


def test_a_student_with_the_teachers_stem_is_the_teacher(photos: Path, teacher: Path, tmp_path: Path) -> None:
    result = train_distill(
        distill_config(photos, teacher, backbone={"stem": "none"}, schedule={"steps": 2}), tmp_path / "run"
    )
    start = result["stages"]["start"]
    assert (start["agreement"], start["kl"], start["token_variance"]) == (100.0, 0.0, 1.0)
    assert start["top1"] == result["teacher_top1"]
    assert result["start"] == "copy"


def test_without_a_step_every_weight_is_the_teachers(
    photos: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, dict[str, Tensor]] = {}
    start = tmp_path / "run" / "stages" / "start.safetensors"
    monkeypatch.setattr(training.Distillation, "_prepare_stage", lambda *_: kept.update(start=load_file(start)))
    with pytest.raises(TypeError):
        train_distill(distill_config(photos, teacher, backbone={"stem": "none"}), tmp_path / "run")
    expected = load_file(teacher)
    assert kept["start"].keys() == expected.keys()
    assert all(torch.equal(kept["start"][name], value) for name, value in expected.items())


def test_the_stems_stage_moves_stem_positions_and_class_token_alone(
    photos: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: dict[str, dict[str, Tensor]] = {}
    keep = training.Distillation._save_stage

    def noting(self: training.Distillation, stage: str, student: Any, facts: Any) -> None:
        weights[stage] = {name: value.detach().clone() for name, value in student.state_dict().items()}
        weights[f"teacher {stage}"] = {name: value.clone() for name, value in self.teacher.state_dict().items()}
        keep(self, stage, student, facts)

    monkeypatch.setattr(training.Distillation, "_save_stage", noting)
    train_distill(distill_config(photos, teacher), tmp_path / "run")
    moved = {name for name, value in weights["start"].items() if not torch.equal(value, weights["stem"][name])}
    own = {"pos_embed", "cls_token", "patch_embed.proj.weight", "patch_embed.proj.bias"}
    norms = {f"patch_embed.{norm}.{kind}" for norm in ("norm_in", "norm") for kind in ("weight", "bias")}
    assert moved == own | norms
    assert all(not torch.equal(value, weights["all"][name]) for name, value in weights["stem"].items())
    original = load_file(teacher)
    for stage in ("start", "stem", "all"):
        assert all(torch.equal(value, original[name]) for name, value in weights[f"teacher {stage}"].items()), stage


def test_norms_come_in_from_nothing_to_all(
    photos: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --start anneal the stem's stage begins with the teacher's own tokens and ends with the norms in place."""
    from dpn_cli.model.norms import GradualNorm

    shares: list[list[float]] = []
    update = engine._Training.update

    def noting(self: Any, *arguments: Any, **named: Any) -> Any:
        shares.append([float(m.progress) for m in self.network.modules() if isinstance(m, GradualNorm)])
        return update(self, *arguments, **named)

    monkeypatch.setattr(engine._Training, "update", noting)
    config = distill_config(photos, teacher, backbone={"start": "anneal"}, stem_share=0.75, schedule={"steps": 8})
    start = train_distill(config, tmp_path / "run")["stages"]["start"]
    assert [share[0] for share in shares[:6]] == pytest.approx(
        [0, 1 / 6 / 0.8, 2 / 6 / 0.8, 3 / 6 / 0.8, 4 / 6 / 0.8, 1]
    )
    assert all(len(item) == 2 for item in shares[:6])
    assert shares[6:] == [[], []]
    assert "patch_embed.norm_in.weight" in load_file(tmp_path / "run" / "weights.safetensors")
    assert (start["agreement"], start["kl"], start["token_variance"]) == (100.0, 0.0, 1.0)


def test_a_gate_that_is_shut_is_the_plain_network() -> None:
    from tasks.classify.distill.student import gate_stem_norms, remove_gates

    plain = load_backbone("mu/8", stem="none", image_size=16, num_classes=3).eval()
    for stem in ("dpn", "post_posemb", "rms"):
        dual = load_backbone("mu/8", stem=stem, image_size=16, num_classes=3).eval()
        dual.load_state_dict({**dual.state_dict(), **plain.state_dict()})
        initial, names = dual.state_dict(), list(dual.state_dict())
        gate_stem_norms(dual)
        image = torch.randn(2, 3, 16, 16)
        assert torch.equal(dual.forward_features(image), plain.forward_features(image))
        remove_gates(dual)
        assert list(dual.state_dict()) == names
        assert all(torch.equal(value, initial[name]) for name, value in dual.state_dict().items())


def test_the_second_stage_continues_with_the_next_batch(
    photos: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[tuple[int, int]] = []
    made: list[tuple[Any, ...]] = []

    def noting(split: Any, augmentation: Any, batch_size: int, seed: int, world: Any, **options: Any) -> engine.Batches:
        batches = crop_batches(split, augmentation, batch_size, seed, world, **options)
        made.append((augmentation, batch_size, seed, options["skip_bad"]))

        def counted(start: int) -> Any:
            run.append((start, len(split.labels)))
            return batches(start)

        return counted

    monkeypatch.setattr(training, "crop_batches", noting)
    changes = {"data": {"jitter": 0.3, "skip_bad_images": True, "flip": False, "crop": "inception", "decode": "pillow"}}
    train_distill(distill_config(photos, teacher, **changes, mixup=0.2, seed=7), tmp_path / "run")
    assert run == [(0, 48), (3, 48)]
    augmentation, batch_size, seed, skip = made[0]
    assert made[0] == made[1]
    assert (batch_size, seed, skip) == (8, 7, True)
    assert (augmentation.jitter, augmentation.mixup, augmentation.flip) == (0.3, 0.2, False)
    assert (augmentation.crop, augmentation.decode, augmentation.size) == ("inception", "pillow", (16, 16))


@pytest.mark.parametrize("step", [1, 4])
def test_a_stopped_run_ends_as_one_that_was_not(
    step: int, photos: Path, teacher: Path, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Stopped before a step of the stem's stage, or of the other one, and resumed: weights equal to the bit."""
    taken = iter(range(100))
    update = engine._Training.update

    def stops(self: Any, *arguments: Any, **named: Any) -> Any:
        if next(taken) == step:
            self.save("last", arguments[1])
            raise StoppedError(signal.SIGTERM)
        return update(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._Training, "update", stops)
        with pytest.raises(StoppedError):
            train_distill(distill_config(photos, teacher), tmp_path / "run")
    result = train_distill(distill_config(photos, teacher), tmp_path / "run", resume=True)
    path, full = finished
    weights, expected = (load_file(run / "weights.safetensors") for run in (tmp_path / "run", path))
    assert all(torch.equal(value, weights[name]) for name, value in expected.items())
    assert result["stages"]["all"]["kl"] == full["stages"]["all"]["kl"]
    assert result["curve"] == full["curve"]


def test_the_result_reports_the_agreement_of_the_student(finished: tuple[Path, dict[str, Any]], teacher: Path) -> None:
    path, result = finished
    assert result["images"] == {"train": 48, "held_out": 12, "val": 6}
    assert [record["step"] for record in result["curve"]] == [2, 3]
    assert set(result["stages"]) == {"start", "stem", "all"}
    assert result["teacher"]["digest"] == load_classifier(str(teacher)).model.report.digest
    actual, expected = (load_classifier(str(place)) for place in (path, teacher))
    config = DistillConfig.model_validate(actual.facts["config"])
    from tasks.classify.distill.data import open_images

    held = open_images(config, CLASSES, Console(quiet=True)).held_out
    with torch.inference_mode():
        images = torch.stack([actual.transform(held.pixels(row)) for row in range(12)])
        tokens = [one.model.forward_features(one.model.normalize(images)).double() for one in (actual, expected)]
        logits = [one.model(one.model.normalize(images)).double() for one in (actual, expected)]
    agreement = 100 * (logits[0].argmax(1) == logits[1].argmax(1)).double().mean().item()
    assert result["agreement"] == pytest.approx(agreement)
    spread = (tokens[1] - tokens[1].mean((0, 1))).square().sum()
    apart = (tokens[0] - tokens[1]).square().sum()
    assert result["token_variance"] == pytest.approx(float(1 - apart / spread), rel=1e-5)
    p, q = (torch.distributions.Categorical(logits=logit) for logit in reversed(logits))
    assert result["kl"] == pytest.approx(torch.distributions.kl_divergence(p, q).mean().item(), rel=1e-4)
    assert actual.classes == CLASSES
    assert actual.facts["trained_on"]["images"] == 48
    described = actual.facts["distilled"]
    assert (described["teacher"]["digest"], described["kl"]) == (result["teacher"]["digest"], result["kl"])
    card = (path / "README.md").read_text()
    for fact in (result["teacher"]["digest"], result["weights_sha256"], result["data"]["train"], "Distilled from"):
        assert fact in card, fact
    titles = [section.title for section in page.findings(read_run(path), "").sections]
    assert titles[:4] == ["Scores", "Calibration", "Classes", "Confusions"]
    answers = read_predictions(path / "predictions.csv", CLASSES)
    assert 100 * sum(prediction.true == prediction.predicted for prediction in answers) / len(answers) == pytest.approx(
        result["top1"]
    )


@pytest.mark.slow
def test_the_file_goes_wherever_weights_go(finished: tuple[Path, dict[str, Any]], photos: Path, tmp_path: Path) -> None:
    path, result = finished
    weights = str(path / "weights.safetensors")
    assert load_backbone(checkpoint=weights, stem="dpn", image_size=16).report.digest == result["weights_sha256"]
    completed = run_dpn("eval", str(path), "--data", str(photos), "--device", "cpu", "--json")
    assert json.loads(completed.stdout)["top1"] == result["top1"]
    onnx = run_dpn("export", str(path), "--to", "onnx", "-o", str(tmp_path / "onnx"))
    assert onnx.exit_code == 0, onnx.stderr
    assert "Distilled from" in (tmp_path / "onnx" / "README.md").read_text()
    converted = run_dpn("checkpoint", "convert", weights, str(tmp_path / "b.safetensors"), "--json")
    assert json.loads(converted.stdout)["difference"] == 0
    named = run_dpn("predict", str(path), str(photos / "val" / "class0" / "000.jpg"), "--device", "cpu")
    assert named.exit_code == 0, named.stderr


def test_classes_match_the_teachers_in_any_order(photos: Path, tmp_path: Path) -> None:
    folder = write_teacher(tmp_path / "teacher.safetensors", names=("class2", "class0", "class1"))
    result = train_distill(distill_config(photos, folder), tmp_path / "run")
    scored = json.loads(run_dpn("eval", str(folder), "--data", str(photos), "--device", "cpu", "--json").stdout)
    assert result["teacher_top1"] == scored["top1"]
    second = json.loads(
        run_dpn("eval", str(tmp_path / "run"), "--data", str(photos), "--device", "cpu", "--json").stdout
    )
    assert result["top1"] == second["top1"]


def test_a_teacher_without_a_head_is_distilled_by_its_tokens(photos: Path, tmp_path: Path) -> None:
    folder = write_teacher(tmp_path / "headless.safetensors", classes=0)
    result = train_distill(distill_config(photos, folder, losses={"logits": 0.0}), tmp_path / "run")
    assert (result["agreement"], result["kl"], result["top1"]) == (None, None, None)
    assert result["token_variance"] > result["stages"]["start"]["token_variance"] - 1
    reloaded = load_backbone(checkpoint=str(tmp_path / "run" / "weights.safetensors"), image_size=16)
    assert reloaded.config.stem == "dpn"


def test_a_teacher_at_another_size_is_reported(photos: Path, teacher: Path, tmp_path: Path) -> None:
    given = "--teacher", str(teacher), "--data", str(photos), "-o", str(tmp_path / "run"), "--device", "cpu", "-j", "0"
    result = run_dpn("distill", *given, "--steps", "2", "-b", "8", "--image-size", "24")
    assert result.exit_code == 0, result.stderr
    output = " ".join(result.stderr.split())
    assert "the teacher runs at the student's 24x24 pixels, not at its own size" in output
    assert "at 24 x 24 pixels" in (tmp_path / "run" / "README.md").read_text()


def test_another_architecture_learns_from_the_logits(photos: Path, teacher: Path, tmp_path: Path) -> None:
    said: list[str] = []
    given: dict[str, Any] = {"data": {"source": str(photos)}, "teacher": str(teacher), "backbone": {"arch": "nano/4"}}
    given |= {"schedule": SMALL["schedule"], "batch_size": 8, "runtime": SMALL["runtime"]}
    config = finalize(build(DistillConfig, resolve(None, given, {}, said.append), "test"))
    losses = config.losses
    assert (losses.tokens, losses.representation, losses.logits, config.stem_share) == (0, 0, 1, 0)
    assert any("from scratch" in line for line in said)
    result = train_distill(config, tmp_path / "run")
    assert (result["arch"], result["start"], result["token_variance"]) == ("nano/4", "scratch", None)
    assert set(result["stages"]) == {"start", "all"}


def test_every_option_of_a_stage_reaches_the_engine(
    photos: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stem's stage has a learning rate of its own and its share of the warm-up; the last one keeps an average."""
    observed: list[tuple[Any, engine.TrainJob]] = []
    fit = engine.fit

    def noting(model: Any, job: engine.TrainJob) -> engine.FitResult:
        observed.append((model.network, job))
        return fit(model, job)

    monkeypatch.setattr(engine, "fit", noting)
    changes: dict[str, Any] = {"stem_lr": 3e-3, "ema": 0.5, "evaluate_every": 4, "backbone": {"drop_path": 0.1}}
    train_distill(distill_config(photos, teacher, **changes, schedule={"steps": 8, "warmup": 4}), tmp_path / "run")
    (_, stem), (network, remaining) = observed
    assert (stem.lr, remaining.lr) == (3e-3, 1e-3)
    assert (stem.ema_decay, remaining.ema_decay) == (None, 0.5)
    assert [(job.schedule.steps, job.schedule.warmup) for job in (stem, remaining)] == [(4, 2), (4, 2)]
    assert [(job.seed, job.batch_size, job.evaluate_every) for job in (stem, remaining)] == [(0, 8, 1), (0, 8, 1)]
    assert network.config.drop_path == 0.1


def test_teacher_and_student_are_probed_with_few_images(photos: Path, teacher: Path, tmp_path: Path) -> None:
    config = distill_config(
        photos, teacher, fewshot_data=str(photos), fewshot=2, data={"decode": "pillow", "max_pixels": 9000}
    )
    asked = final_probe_options(config)
    assert asked is not None
    assert (asked.reading.decode, asked.reading.max_pixels) == ("pillow", 9000)
    result = train_distill(config, tmp_path / "run")
    assert set(result["fewshot"]) == {"student", "teacher"}
    options = "--shots", "2", "--device", "cpu", "--decode", "pillow", "--json"
    probe = run_dpn("eval", "fewshot", str(teacher), "--data", str(photos), *options)
    assert result["fewshot"]["teacher"]["accuracy"] == json.loads(probe.stdout)["accuracy"]


def _unlike(changes: dict[str, Any], teacher: Path, photos: Path, path: Path) -> Iterator[str]:
    from dpn_cli.errors import DpnError

    with pytest.raises(DpnError) as caught:
        train_distill(distill_config(changes.pop("photos", photos), changes.pop("teacher", teacher), **changes), path)
    yield str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 64}, "48 images to train on, fewer than one batch of 64; use --batch-size 48 at most"),
        ({"data": {"held_out": 0.0}}, "none of 60 images is held out"),
        ({"backbone": {"arch": "mu/8", "start": "copy"}}, "arch (mu/8) is another network"),
        ({"backbone": {"start": "anneal"}, "stem_share": 0.0}, "give it a --stem-share"),
        ({"backbone": {"arch": "mu/8"}, "stem_share": 0.5}, "stem_share: trains a stem before blocks"),
        ({"backbone": {"pool": "gap"}}, "backbone.pool: the teacher decides it; leave it at null"),
        ({"stem_share": 0.0, "stem_lr": 1e-3}, "stem_lr: the learning rate of the stem's stage"),
        ({"losses": {"tokens": 0.0, "representation": 0.0, "logits": 0.0}}, "one of them at least is above 0"),
        ({"backbone": {"arch": "nano/8"}, "losses": {"tokens": 1.0}, "stem_share": 0.0}, "the student is 64 wide"),
        (
            {"backbone": {"arch": "mu/4"}, "losses": {"tokens": 1.0}, "stem_share": 0.0},
            "the student has 4x4 patches, the teacher 2x2",
        ),
        (
            {"losses": {"layers": [[0, 7]]}},
            "losses.layers: [0, 7]: the student has the blocks 0 to 0, the teacher 0 to 0",
        ),
        ({"backbone": {"stem": "dpn_no_affine", "start": "retrofit"}}, "use --start copy"),
        ({"backbone": {"image_size": 20}}, "20"),
        ({"stem_share": 0.05}, "--stem-share 0.05: 0 of 6 steps would train the stem alone"),
        ({"stem_share": 0.95}, "--stem-share 0.95: 6 of 6 steps would train the stem alone"),
        ({"teacher": "nowhere.safetensors"}, "nowhere.safetensors: no such file or folder"),
        ({"photos": "nowhere"}, "--data nowhere: no such folder; pass a folder of images"),
    ],
)
def test_a_mismatch_is_reported_on_one_line(
    changes: dict[str, Any], message: str, teacher: Path, photos: Path, tmp_path: Path
) -> None:
    (line,) = _unlike(dict(changes), teacher, photos, tmp_path / "run")
    assert message in line
    assert "\n" not in line


def test_a_deeper_student_needs_to_know_which_block_is_which(photos: Path, tmp_path: Path) -> None:
    from dpn_cli.errors import DpnError
    from tasks.classify.distill.student import check_pair

    shallow, deep = (load_backbone(arch, stem="none", image_size=16, num_classes=3) for arch in ("mu/8", "nano/8"))
    config = distill_config(photos, "x", losses={"tokens": 0.0, "representation": 0.0, "attention": 1.0})
    with pytest.raises(DpnError, match=r"losses.layers: the student has 4 blocks, the teacher 1; .*\[\[3, 0\]\]"):
        check_pair(config, shallow, deep)
    mapped = distill_config(photos, "x", losses={**config.losses.model_dump(), "layers": [[3, 0]]})
    assert list(check_pair(mapped, shallow, deep)) == [(3, 0)]


def test_another_teacher_or_other_images_do_not_continue_a_run(
    photos: Path, teacher: Path, tmp_path: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    from dpn_cli.errors import DataError

    path = tmp_path / "run"
    own = write_teacher(tmp_path / "own.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            training.Distillation, "_prepare_stage", lambda *_: (_ for _ in ()).throw(StoppedError(signal.SIGTERM))
        )
        with pytest.raises(StoppedError):
            train_distill(distill_config(photos, own), path)
    write_teacher(own, placement="post,post")
    with pytest.raises(DataError, match="the weights have changed since this run started"):
        train_distill(distill_config(photos, own), path, resume=True)


def test_a_dry_run_leaves_nothing(
    photos: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_dpn(
        "distill", "--teacher", str(teacher), "--data", str(photos), "--steps", "40", "-b", "8", "-o",
        str(tmp_path / "run"), "--dry-run", "--device", "cpu", "-j", "0",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "dry run passed: 1 training in about" in result.stderr
    assert result.stdout.splitlines()[1].split()[-6:-4] == ["40", "1"]
    assert not (tmp_path / "run").exists()


def test_starts_and_seeds_are_compared_side_by_side(photos: Path, teacher: Path, tmp_path: Path) -> None:
    completed = run_dpn(
        "distill", "--teacher", str(teacher), "--data", str(photos), "--steps", "4", "-b", "8", "--device", "cpu", "-j",
        "0", "-o", str(tmp_path / "run"), "--compare", "stem=dpn,start=copy;stem=dpn,start=retrofit;stem=none",
        "--seeds", "2", "--stem-share", "0", "--json", "-q",
    )  # fmt: skip
    assert completed.exit_code == 0, completed.stderr
    result = json.loads(completed.stdout)
    networks = result["compare"]["networks"]
    assert list(networks) == ["stem=dpn,start=copy", "stem=dpn,start=retrofit", "stem=none"]
    for name, network in networks.items():
        runs = list(network["runs"].values())
        assert network["agreement"]["values"] == pytest.approx([item["agreement"] for item in runs])
        assert {run["start"] for run in runs} == {"copy" if name != "stem=dpn,start=retrofit" else "retrofit"}
        assert runs[0]["stages"]["start"]["kl"] == runs[1]["stages"]["start"]["kl"]
        assert runs[0]["kl"] != runs[1]["kl"]
    assert [difference["network"] for difference in result["compare"]["differences"]] == list(networks)[1:]


# Adam divides by gradients that are zero but for rounding, those of the keys' biases.
MOMENTUM: dict[str, Any] = {
    "optim": {"name": "momentum", "weight_decay": 0.0},
    "losses": {"logits": 0.0},  # ranks would wait for the head's gradient if it were trained
}


def two_ranks(world: World, folder: Path) -> None:
    os.environ.update(WORLD_SIZE=str(world.size), RANK=str(world.rank))  # as torchrun sets them
    for name, shard in (("run", False), ("parts", True)):
        runtime = {"runtime": {"shard": shard}}
        config = distill_config(folder / "photos", folder / "teacher.safetensors", **MOMENTUM, **runtime)
        command.run(config, LaunchOptions(folder / name), Console(quiet=True))


@pytest.mark.slow
def test_two_ranks_distil_like_one(tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "teacher.safetensors")
    write_class_folders(tmp_path / "photos" / "train", classes=3, each=20)
    write_class_folders(tmp_path / "photos" / "val", classes=3, each=2)
    run_distributed(two_ranks, tmp_path)
    single = train_distill(distill_config(tmp_path / "photos", teacher, **MOMENTUM), tmp_path / "alone")
    expected = load_file(tmp_path / "alone" / "weights.safetensors")
    for run in ("run", "parts"):
        together = json.loads((tmp_path / run / "result.json").read_text())
        assert (together["images"], together["top1"]) == (single["images"], single["top1"])
        for stage, note in single["stages"].items():
            both = together["stages"][stage]
            assert (both["kl"], both["token_variance"]) == pytest.approx((note["kl"], note["token_variance"]), rel=1e-4)
        actual = load_file(tmp_path / run / "weights.safetensors")
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-3, atol=1e-5)


def test_noise_reaches_the_student(photos: Path, teacher: Path, tmp_path: Path) -> None:
    weights = []
    for noise in (0.0, 60.0):
        folder = tmp_path / f"{noise:g}"
        train_distill(distill_config(photos, teacher, data={"noise": noise}), folder)
        weights.append(load_file(folder / "weights.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_student_and_teacher_see_images_upright(photos: Path, teacher: Path, tmp_path: Path) -> None:
    data = shutil.copytree(photos, tmp_path / "photos")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for path in (data / "train").rglob("*.jpg"):
        with Image.open(path) as image:
            image.save(path, quality=95, exif=exif)
    weights = []
    for upright in (False, True):
        folder = tmp_path / f"{upright}"
        train_distill(distill_config(data, teacher, data={"exif": upright}), folder)
        weights.append(load_file(folder / "weights.safetensors"))
        assert load_classifier(str(folder)).exif == upright
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
