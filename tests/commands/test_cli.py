"""The command line: help without torch, the frozen set of options, completion, and wrong commands."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dpn_cli.cli import COMMANDS
from dpn_cli.commands import train
from dpn_cli.config.load import read_config, shipped_configs
from support.cli import run_dpn
from support.goldens import GOLDENS
from support.programs import ROOT, program_environment, run_program


def dpn(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does, in a process of its own."""
    command = [sys.executable, "-m", "dpn_cli", *arguments]
    return run_program(command, cwd=cwd, env=program_environment(**{"COLUMNS": "100", **variables}))


LIGHT = [
    ["--help"],
    ["checkpoint", "--help"],
    ["checkpoint", "inspect", "--help"],
    ["checkpoint", "convert", "--help"],
    ["checkpoint", "retrofit", "--help"],
    ["finetune", "--help"],
    ["finetune", "vtab", "--help"],
    ["lit", "--help"],
    ["lit", "train", "--help"],
    ["pretrain", "--help"],
    ["pretrain", "--print-config"],
    ["plan", "pretrain", "--help"],
    ["plan", "distill", "--help"],
    ["data", "pack", "--help"],
    ["data", "check", "lit", "--help"],
    ["data", "prepare", "vtab", "--help"],
    ["doctor", "--help"],
    ["segment", "--help"],
    ["segment", "ade20k", "--fraction", "0.25", "--print-config"],
    ["configs"],
    ["configs", "show", "vtab"],
    ["finetune", "vtab", "--print-config"],
    ["lit", "train", "--print-config"],
    ["report", "--help"],
    ["runs", "--help"],
    ["--version"],
]


def test_help_and_configs_load_neither_torch_nor_timm() -> None:
    """One process runs all of them: what one has loaded, the next would find."""
    script = (
        "import json, sys\n"
        "from dpn_cli.cli import app\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['dpn', *words]\n"
        "    app(words, standalone_mode=False)\n"
        "    slow = {'torch', 'timm', 'torchvision', 'datasets', 'scipy', 'numpy', 'matplotlib', 'jinja2'}\n"
        "    heavy = slow & set(sys.modules)\n"
        "    assert not heavy, (words, heavy)\n"
        "    assert words != ['--help'] or 'dpn_cli.commands.train' not in sys.modules\n"
        "    print('END OF', *words)\n"
    )
    result = run_program([sys.executable, "-c", script, json.dumps(LIGHT)], cwd=ROOT)
    assert result.returncode == 0, result.stderr
    parts = result.stdout.split("END OF")
    assert len(parts) == len(LIGHT) + 1
    assert all(len(part) > 40 or "dpn " in part for part in parts[:-1])


OPTIONS = {
    "--arch",
    "--stem",
    "--norm",
    "--placement",
    "--checkpoint",
    "--image-size",
    "--compare",
    "--data",
    "--tasks",
    "--decode",
    "--max-pixels",
    "--skip-bad-images",
    "--protocol",
    "--lrs",
    "--seeds",
    "--steps",
    "--batch-size",
    "--precision",
    "--compile",
    "--no-compile",
    "--micro-batch-size",
    "--device",
    "--workers",
    "--report-to",
    "--jobs",
    "--jobs-per-gpu",
    "--engine",
    "--resources",
    "--trial",
    "--list-trials",
    "--shard",
    "--no-shard",
    "--output-dir",
    "--resume",
    "--overwrite",
    "--config",
    "--set",
    "--print-config",
    "--dry-run",
    "--no-report",
    "--json",
    "--quiet",
    "--verbose",
    "--help",
    "--help-all",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_is_the_first_of_its_own_help(name: str) -> None:
    """The root's help is written without importing the command."""
    assert inspect.cleandoc(COMMANDS[name].load(name).help).split("\n\n")[0] == COMMANDS[name].help


def test_the_set_of_options_is_frozen_and_each_shows_its_default() -> None:
    import typer.main

    from dpn_cli.cli import app

    command = typer.main.get_command(app).commands["finetune"].commands["vtab"]  # type: ignore[attr-defined]
    parameters = [p for p in command.params if p.param_type_name == "option"]
    names = {name for p in parameters for name in (*p.opts, *p.secondary_opts) if name.startswith("--")}
    assert names | {"--help"} == OPTIONS
    for parameter in parameters:
        takes_value = not parameter.is_flag
        if parameter.name == "help_all":
            continue
        if takes_value and parameter.name not in {"config", "set"}:
            assert "[default: " in parameter.help, parameter.name
        assert parameter.rich_help_panel, parameter.name


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["finetune", "--help"],
        ["finetune", "vtab", "--help"],
        ["lit", "--help"],
        ["lit", "train", "--help"],
        ["lit", "cache", "--help"],
        ["lit", "eval", "--help"],
        ["lit", "predict", "--help"],
        ["lit", "search", "--help"],
        ["lit", "export", "--help"],
        ["configs", "--help"],
        ["checkpoint", "--help"],
        ["checkpoint", "inspect", "--help"],
        ["checkpoint", "convert", "--help"],
        ["checkpoint", "retrofit", "--help"],
        ["pretrain", "--help"],
        ["plan", "pretrain", "--help"],
        ["plan", "distill", "--help"],
        ["data", "pack", "--help"],
        ["data", "prepare", "--help"],
        *(["data", "prepare", name, "--help"] for name in ("vtab", "ade20k", "coco")),
        *(["data", "check", name, "--help"] for name in ("vtab", "highres", "pretrain", "lit", "ade20k", "folder")),
        ["doctor", "--help"],
        ["segment", "--help"],
        *(["segment", name, "--help"] for name in ("ade20k", "folder", "eval", "predict")),
    ],
)
def test_every_help_page_has_an_example_to_copy(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = run_dpn(*command)
    assert f"Example: dpn {' '.join(command[:-1])}" in page.stdout
    if command == ["finetune", "vtab", "--help"]:
        page = run_dpn(*command[:-1], "--help-all")
        for panel in ("Model", "Data", "Training", "Runtime", "Output and config"):
            assert f"─ {panel} ─" in page.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dpn finetune vtab --arch B", "B/32"),
        ("dpn finetune vtab --stem dp", "dpn_no_affine"),
        ("dpn finetune vtab --tasks svhn,dt", "svhn,dtd"),
        ("dpn configs show vtab_", "vtab_demo"),
    ],
)
def test_shell_completion_knows_archs_stems_tasks_and_configs(line: str, expected: str) -> None:
    from dpn_cli.cli import app

    words = {"_DPN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    result = CliRunner().invoke(app, env=words, prog_name="dpn")
    assert expected in result.stdout.split(), result.output


def test_configs_are_listed_with_paper_table_and_number() -> None:
    listed = dpn("configs", COLUMNS="500").stdout  # wide enough for every text on one line
    for name in shipped_configs():
        about = read_config(name)["about"]
        assert all(about[key] in listed for key in ("paper", "table", "expected")), name
    output = yaml.safe_load(dpn("configs", "show", "vtab").stdout)
    assert output["schedule"]["steps"] == 2500
    assert output["runtime"]["micro_batch_size"] == "auto"


def test_print_config_shows_the_resolved_config() -> None:
    printed = dpn(
        "finetune",
        "vtab",
        "--arch",
        "B/16",
        "--data",
        "x",
        "--lrs",
        "0.1",
        "--set",
        "optim.clip_norm=null",
        "--no-compile",
        "-b",
        "64",
    )
    assert printed.returncode != 0  # no weights
    printed = dpn(
        "finetune",
        "vtab",
        "--arch",
        "B/16",
        "--data",
        "x",
        "--lrs",
        "0.1",
        "--set",
        "optim.clip_norm=null",
        "--compile",
        "-b",
        "64",
        "--print-config",
    )
    output = yaml.safe_load(printed.stdout)
    assert (output["backbone"]["arch"], output["lrs"], output["optim"]["clip_norm"]) == ("B/16", [0.1], None)
    assert (output["runtime"]["compile"], output["batch_size"], output["data"]["source"]) == (True, 64, "x")


PLAIN = str(GOLDENS / "vit_tok_repsize.params.npz")
WRONG = [
    (["--arch", "B/31"], 2, "the patch 31x31 does not divide it"),
    (["--arch", "b/32"], 2, "use SIZE/PATCH"),
    (
        ["--stem", "dnp"],
        2,
        "--stem: one of none, pre, post, post_posemb, dpn, dpn_no_affine, affine_only, rms (got 'dnp'); did you mean",
    ),
    (["--tasks", "svnh"], 2, "choose from all, natural"),
    (["--set", "optim.lrr=1"], 2, "optim.lrr: unknown key"),
    (["--arch", "B/32", "--data", "."], 2, "no weights were given. Ways out"),
    (["--checkpoint", "none", "--data", "nowhere", "--arch", "mu/8"], 3, "no such folder"),
    (["--checkpoint", "missing.npz", "--data", "demo", "--arch", "mu/8"], 3, "no such file"),
    (["--checkpoint", PLAIN, "--stem", "dpn", "--image-size", "32"], 2, "has stem 'none'"),
    (["--checkpoint", "hf-hub:nobody/nothing"], 3, "not in the local cache"),
    (["--data", "hf:nobody/nothing", "--checkpoint", "none", "--arch", "mu/8"], 3, "not loaded"),
    (["--device", "cuda:7"], 2, "this machine has cpu"),
    (["--config", "nowhere.yaml"], 2, "no such file"),
    (["--precision", "fp8"], 2, "--precision: one of auto, bf16, fp32 (got 'fp8')"),
    (["--stesp", "5"], 2, "No such option"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG)
def test_wrong_commands_end_with_one_line_and_their_code(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_dpn("finetune", "vtab", "-o", str(tmp_path / "run"), "-q", *arguments)
    assert result.exit_code == code, result.stderr
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    if message != "No such option":
        assert len(result.stderr.strip().splitlines()) == 1


def test_an_unknown_command_names_the_nearest() -> None:
    process = dpn("finetune", "vtb")
    assert process.returncode == 2
    assert "vtab" in process.stderr


NOWHERE = [
    ("finetune vtab", "--data nowhere: no such folder; it holds one folder per task"),
    ("finetune highres", "--data nowhere: no such folder; it holds train/CLASS/IMAGE.jpg"),
    ("pretrain", "--data nowhere: no such folder; it holds train/CLASS/IMAGE.jpg"),
    ("pretrain --val-data", "--val-data nowhere: no such folder; it holds train/CLASS/IMAGE.jpg"),
    ("lit train", "--data nowhere: no such file or folder; pass a .csv or .tsv"),
    ("segment ade20k", "--data nowhere: no such folder; it holds images/{training,validation}"),
    ("segment folder", "--data nowhere: no such folder; it holds images/{training,validation}"),
    ("distill", "--data nowhere: no such folder; pass a folder of images"),
]


@pytest.mark.parametrize(("command", "message"), NOWHERE)
def test_data_that_do_not_exist_are_named_before_anything_is_loaded(
    command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "load_trainer", None)  # which loads torch
    words, val_option, _ = command.partition(" --val-data")
    data = ["--data", "demo", "--val-data", "nowhere"] if val_option else ["--data", "nowhere"]
    result = run_dpn(*words.split(), *data, "-o", "run")
    assert result.exit_code == 3, result.output
    assert f"error: {message}" in result.stderr.replace("\n", " ")
    assert "run folder" not in result.stderr
    assert not Path("run").exists()
