"""CONTRIBUTING.md's worked examples: applied to a copy of the project, each does what the page says."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from support.docs import read_code_blocks
from support.images import write_class_folders
from support.layout import check_imports, check_size
from support.programs import ROOT, program_environment, run_program

pytestmark = pytest.mark.slow

PAGE = ROOT / "CONTRIBUTING.md"

# Runs in the copy. Results go to stdout as one JSON object on the last line.
SCRIPT = """
import json, sys, typer.main
from pathlib import Path
import timm, torch, yaml
from typer.testing import CliRunner
import dpn_cli
from dpn_cli.cli import app
from dpn_cli.model.stem import PatchStem
from dpn_cli.weights.backbone import load_backbone

out = {"place": dpn_cli.__file__}

def dpn(*words):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (words, done.output, done.exception)
    return done.stdout

SHORT = ["--steps", "2", "--device", "cpu", "-j", "0", "-q"]
TOWER = ["--arch", "mu/16", "--image-size", "32"]

def help_of(*words):
    command = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    return {parameter.opts[0]: parameter.help for parameter in command.params}

# An option.
out["help"] = [help_of(*words)["--temperature"] for words in (["pretrain"], ["finetune", "highres"])]
photos = ["--data", "photos", "--val-fraction", "0.2", "-b", "8", "--checkpoint", "none"]
highres = ["finetune", "highres", *photos, *TOWER, *SHORT]
out["config"] = yaml.safe_load(dpn(*highres, "--temperature", "4", "--print-config"))["temperature"]
out["refused"] = CliRunner().invoke(app, [*highres, "--temperature", "0", "--print-config"]).stderr
out["losses"] = {}
for degrees in ("1", "4"):
    dpn(*highres, "--temperature", degrees, "--set", "schedule.warmup=0", "-o", f"highres-{degrees}")
    records = map(json.loads, Path(f"highres-{degrees}/metrics.jsonl").read_text().splitlines())
    out["losses"][degrees] = [record["loss"] for record in records if "lr" in record]

# A task.
rotate = ["rotate", "--data", "demo", "--images", "64", "-b", "16", *TOWER, *SHORT]
dpn(*rotate, "--dry-run")
out["rotate"] = json.loads(dpn(*rotate, "-o", "rotate", "--json", "--stem", "pre_rms"))
out["rotate again"] = json.loads(dpn(*rotate, "-o", "rotate", "--json", "--stem", "pre_rms", "--resume"))
out["rotate config"] = yaml.safe_load(dpn("configs", "show", "rotate"))
out["rotate weights"] = json.loads(dpn("checkpoint", "inspect", "rotate/weights.safetensors", "--json"))

# A weight format.
shape = {"embed_dim": 32, "depth": 1, "num_heads": 2, "patch_size": 16, "img_size": 32, "num_classes": 3}
model = timm.create_model("vit_base_patch16_224", **shape).eval()
torch.save({"state_dict": {f"net.{name}": value for name, value in model.state_dict().items()}}, "module.ckpt")
arch = ["--heads", "2", "--json"]
out["format"] = json.loads(dpn("checkpoint", "inspect", "module.ckpt", *arch))["format"]
ours = load_backbone("mu/16", checkpoint="module.ckpt", image_size=None, num_classes=3, head="load").eval()
image = torch.rand(2, 3, 32, 32)
with torch.no_grad():
    out["format error"] = float((model(image) - ours(image)).abs().max())

# A stem: W (p / rms(p)) + b, with the patch p flattened as (row, column, channel).
stem = PatchStem(stem="pre_rms", eps=0.0, embed_dim=8, img_size=4, patch_size=4)
patch = image[:, :, :4, :4]
normed = patch / patch.square().mean((1, 2, 3), keepdim=True).sqrt()
with torch.no_grad():
    expected = torch.einsum("bcpq,dcpq->bd", normed, stem.proj.weight) + stem.proj.bias
    out["stem error"] = float((stem(patch)[:, 0] - expected).abs().max())

# A norm of the blocks.
from dpn_cli.model.norms import token_norm
norm = token_norm("max", 6, eps=0.0)
norm.reset_parameters()
tokens = torch.tensor([[[1.0, -4.0, 2.0, 0.0, 3.0, 4.0]]])
out["norm"] = norm(tokens).flatten().tolist()
dpn("pretrain", "--data", "photos", "--val-fraction", "0.2", "-b", "8", *TOWER, *SHORT, "--norm", "max", "-o", "max")
out["norm of the run"] = json.loads(dpn("checkpoint", "inspect", "max", "--json"))["norm"]
print(json.dumps(out))
"""


def apply(root: Path, language: str, block: str) -> None:
    """Write the file that a block names in its first line, or change it as a diff says."""
    first, _, body = block.partition("\n")
    path = root / first.removeprefix("# ")
    if language != "diff":
        assert not path.exists(), path
        path.parent.mkdir(exist_ok=True)
        path.write_text(body)
        return
    text = path.read_text()
    for hunk in body.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] not in sign) for sign in "+-")
        assert text.count(old) == 1, (path, old)
        text = text.replace(old, new)
    path.write_text(text)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with all examples."""
    root = tmp_path_factory.mktemp("project")
    for part in ("dpn_cli", "tasks", "configs"):
        shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    for language, body in read_code_blocks(PAGE.read_text(encoding="utf-8")):
        if re.match(r"# [\w/]+\.(py|yaml)\n", body):
            apply(root, language, body)
    return root


@pytest.fixture(scope="module")
def results(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("work")
    write_class_folders(work / "photos", classes=2, each=10)
    variables = {"PYTHONPATH": str(project), "DPN_HOME": str(work / "home")}
    result = run_program([sys.executable, "-c", SCRIPT], cwd=work, env={**program_environment(), **variables})
    assert result.returncode == 0, result.stderr
    output: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert Path(output["place"]).is_relative_to(project)
    return output


def test_the_examples_pass_lint(project: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", project)
    for check in (["check"], ["format", "--check"]):
        result = run_program([sys.executable, "-m", "ruff", *check, "dpn_cli", "tasks"], cwd=project)
        assert result.returncode == 0, result.stdout


def test_a_field_with_a_flag_is_an_option(results: dict[str, Any]) -> None:
    assert results["help"] == ["Divide logits by this before the loss. \\[default: 1]"] * 2
    assert results["config"] == 4
    assert "--temperature: a number above 0 (got 0.0)" in results["refused"]
    plain, warm = results["losses"]["1"], results["losses"]["4"]
    assert plain[0] == warm[0]  # a head of zeros gives every class the same loss
    assert plain[1] != warm[1]


def test_a_task_is_a_config_a_trainer_and_an_entry(results: dict[str, Any]) -> None:
    assert results["rotate"]["steps"] == 2
    assert results["rotate"]["loss"] > 0
    assert results["rotate again"] == results["rotate"] | {"weights_sha256": results["rotate weights"]["digest"]}
    assert results["rotate config"]["schedule"]["warmup"] == 100
    assert results["rotate weights"]["stem"] == "pre_rms"
    assert results["rotate weights"]["classes"] == 4


def test_a_weight_format_is_a_reader_and_a_line(results: dict[str, Any]) -> None:
    assert results["format"] == "Lightning"
    assert results["format error"] < 1e-5


def test_a_stem_is_a_name_and_its_norms(results: dict[str, Any]) -> None:
    assert results["stem error"] < 1e-5


def test_a_norm_is_a_class_and_a_line(results: dict[str, Any]) -> None:
    assert results["norm"] == [0.25, -1, 0.5, 0, 0.75, 1]
    assert results["norm of the run"] == "max"


def test_the_examples_keep_to_the_layers(project: Path) -> None:
    added = [project / "tasks/rotate/command.py", project / "dpn_cli/weights/formats/lightning.py"]
    for path in added:
        check_imports(path, project)
        check_size(path)
