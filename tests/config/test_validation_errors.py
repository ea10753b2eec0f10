"""Wrong values in configs and options: each is answered in plain words with what is allowed."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from dpn_cli.arch import find_nearest
from dpn_cli.commands.trainers import HIGHRES, TRAIN_COMMANDS, schema_of
from dpn_cli.config.load import build, from_settings, merge, read_config, read_yaml
from dpn_cli.config.validation_errors import describe_allowed
from dpn_cli.errors import DpnError
from support.cli import run_dpn
from tasks.vtab.tasks import TASKS

# Words of pydantic, and of Python where a person reads.
JARGON = re.compile(
    r"(?i)input should|unable to|valid (tuple|list|integer|number|string|boolean|dict)|\[type=|pydantic"
)
WRONG: list[Any] = [
    "none such", "", "\x1b[31m", -(10**9), -1, 0, 10**30, 1.5, float("nan"), float("inf"), True, None, [], [-1], ["x"],
    [[1]], [1, 2, 3], [True, None], {}, {"a": 1}, {1: 2}, datetime.date(2020, 1, 1), b"\xff", {1, 2},
]  # fmt: skip


def fields(schema: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, field in schema.model_fields.items():
        yield (*prefix, name), field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, (*prefix, name))


@pytest.mark.parametrize("command", TRAIN_COMMANDS)
def test_every_field_of_every_config_describes_its_values(command: str) -> None:
    for path, field in fields(TRAIN_COMMANDS[command].schema):
        described = describe_allowed(field.annotation, [*field.metadata, field])
        assert "another kind" not in described, path
        assert not JARGON.search(described), path


@pytest.mark.parametrize("name", ["vtab", "highres", "lit", "pretrain", "pretrain_sun397", "ade20k"])
def test_every_wrong_value_of_every_field_is_named_with_the_allowed_values(name: str) -> None:
    shipped = read_config(name)
    schema, refused = schema_of(shipped, name), 0
    for path, _ in fields(schema):
        for value in WRONG:
            layer: Any = value
            for part in reversed(path):
                layer = {part: layer}
            full = {**shipped, path[0]: layer[path[0]]} if len(path) == 1 else merge(shipped, layer)
            try:
                build(schema, full, "config")
            except DpnError as error:
                refused += 1
                text = str(error)
                assert not JARGON.search(text), text
                assert "\n" not in text
                # The key, or what its own check says.
                assert text.startswith((f"config: {path[0]}", "config: ", "--arch")), text
                assert path[-1] in text or "--" in text or "compare" in text, (path, value, text)
    assert refused > 500


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("vtab", "lrs={}", "lrs: a list of one or more, each a number above 0 (got {})"),
        ("vtab", "optim.betas=0.9", "optim.betas: two values, each a number of at least 0 and below 1 (got 0.9)"),
        ("vtab", "backbone.image_size=224xabc", "backbone.image_size: a side of at most 16384 pixels"),
        ("vtab", "backbone.image_size=1000000000", "224 or 224x160, or null (got 1000000000)"),
        ("vtab", "seeds=1000000000", "seeds: how many seeds, at most 1000, or a list of them from 0 to 4294967295"),
        ("vtab", "seeds=true", "seeds: how many seeds"),
        ("highres", "seed=1180591620717411303424", "seed: a whole number from 0 to 4294967295 (got 11805916207174"),
        ("highres", "runtime.workers=-1", "runtime.workers: a whole number from 0 to 1024, or auto (got -1)"),
        ("highres", "optim.clip_norm=0", "optim.clip_norm: a number above 0, or null (got 0)"),
        ("highres", "schedule.stairs=[[1]]", "schedule.stairs: a list, each two values, a whole number and a number"),
        ("highres", "freeze={}", "freeze: a list, each text (got {})"),
        ("highres", "optim=[]", "optim: a section of keys (name, momentum, betas, "),
        ("pretrain_sun397", "stages=[{epochs: 1, grid: {lr: x}}]", "grid.lr: a list of one or more, each a number ("),
        ("pretrain_sun397", "stages=[{epochs: 1, grid: 3}]", "stages.0.grid: keys with values, each a list"),
        ("pretrain_sun397", "stages=[{}]", "stages.0.epochs: missing; a number above 0"),
        ("ade20k", "data.scale=512", "data.scale: two values, each a whole number above 0 and at most 16384"),
        ("lit", "text.clean=canonical", "(got 'canonical'); did you mean 'canonicalize'?"),
    ],
)  # fmt: skip
def test_types_are_described_by_their_values(name: str, setting: str, message: str) -> None:
    plain = merge(read_config(name), from_settings([setting]))
    with pytest.raises(DpnError) as caught:
        build(schema_of(plain, name), plain, "config")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optim.clp", "optim.clip_norm"),
        ("optim.clip", "optim.clip_norm"),
        ("optim.momentun", "optim.momentum"),
        ("optim.weigth_decay", "optim.weight_decay"),
        ("schedule.warm", "schedule.warmup"),
        ("clip_norm", "optim.clip_norm"),
        ("backbone.grad_check", "backbone.grad_checkpointing"),
        ("optm", "optim"),
        ("lrs", "lr"),
        ("steps", "schedule.steps"),
        ("schedule.epochs", "epochs"),
        ("batch", "batch_size"),
        ("optimizer", "optim"),
        ("zzz.qqq", None),
        ("foo", None),
        ("optim.foo", None),
        ("data.path", None),
        ("train", None),
        ("model", None),
    ],
)
def test_an_unknown_key_is_reported_with_the_nearest(key: str, meant: str | None) -> None:
    plain = merge(read_config("highres"), from_settings([f"{key}=1"]))
    with pytest.raises(DpnError) as caught:
        build(HIGHRES.schema, plain, "config")
    assert f"unknown key; {f'did you mean {meant!r}?' if meant else 'see dpn configs show'}" in str(caught.value)


def test_a_name_is_suggested_only_if_it_is_similar() -> None:
    tasks, stems = [task.name for task in TASKS], ("dpn", "dpn_no_affine", "none", "post_posemb")
    for given, allowed_names, meant in (
        ("dtb", tasks, "dtd"), ("cifar", tasks, "cifar100"), ("sun", tasks, "sun397"), ("foo", tasks, None),
        ("cars", tasks, None), ("dnp", stems, "dpn"), ("DPN", stems, "dpn"), ("post_pos", stems, "post_posemb"),
        ("plain", stems, None), ("ViT-B/32", ("B/32", "B/16", "L/16"), "B/32"),
        ("medium3", ("medium1", "medium2"), None), ("vit", ("vit_a", "vit_b"), None),
    ):  # fmt: skip
        assert find_nearest(given, allowed_names) == meant, given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + "[" * 100_000, "nested more than 20 levels deep"),
        ("- " * 3000 + "1", "nested more than 20 levels deep"),
        ("a: &a [*a]", "nested more than 20 levels deep, or an alias inside its own value"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in ("ab", "bc", "cd", "de", "ef")),
            "more than 10000 values",
        ),
        ("lr: 1\nlr: 2", "the key 'lr' is given twice"),
        ("a: 2020-13-45", "not valid YAML: month must be in 1..12"),
        ("a: " + "9" * 5000, "not valid YAML: "),
        ("a: !!python/object:os.system x", "not valid YAML: "),
    ],
)
def test_yaml_that_would_overwhelm_its_reader_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_yaml(text)
    (tmp_path / "mine.yaml").write_text(text)
    result = run_dpn("finetune", "highres", "-c", str(tmp_path / "mine.yaml"), "--print-config")
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    if "\n" not in text and text.startswith("a: "):
        result = run_dpn("finetune", "highres", "--set", f"lr={text[3:]}", "--print-config")
        assert (result.exit_code, message in result.stderr, len(result.stderr.splitlines())) == (2, True, 1)


def test_merged_keys_are_not_given_twice() -> None:
    assert read_yaml("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}") == {"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"lr: 1\n# caf\xe9\n", "not UTF-8 text (byte 0xe9 at 11); save it as UTF-8"),
        ("lr: 1".encode("utf-16"), "not UTF-8 text (byte 0xff at 0)"),
        (b"lr: 1 #" + b"x" * 1_000_001, "larger than 1000 kB, which no config is"),
        (None, "not readable (Is a directory)"),
    ],
)
def test_a_config_file_that_cannot_be_read_is_one_line(data: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(data) if data is not None else path.mkdir()
    for command in (
        ["finetune", "vtab"],
        ["finetune", "highres"],
        ["lit", "train"],
        ["pretrain"],
        ["segment", "ade20k"],
    ):
        result = run_dpn(*command, "-c", str(path), "--print-config")
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
        assert f"--config {path}: {message}" in result.stderr


def test_a_long_name_is_no_file() -> None:
    result = run_dpn("finetune", "vtab", "-c", "a" * 300 + ".yaml", "--print-config")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "not readable (File name too long)" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["finetune", "highres", "--lr", "abc"], "--lr: a number (got 'abc'); see '"),
        (["pretrain", "--steps", "0"], "--steps: a whole number above 0 (got 0)"),
        (["data", "pack", "--data", "x", "-o", "y", "--quality", "500"], "--quality/..: a whole number from 1 to 100"),
        (["finetune", "vtab", "--stesp", "5"], "No such option: --stesp; did you mean '--steps'?; see '"),
        (["pretrain", "--cuda"], "No such option: --cuda; see '"),
        (["predct"], "No such command 'predct'; did you mean 'predict'?; see '"),
        (["fnord"], "No such command 'fnord'; see '"),
        (["predict"], "Missing argument 'run'; see '"),
        (["nonsense\x1b[31m"], r"No such command 'nonsense\x1b[31m'"),
    ],
)
def test_a_wrong_command_line_is_reported_on_one_line(arguments: list[str], message: str) -> None:
    result = run_dpn(*arguments)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert message.replace("/..", "") in result.stderr.replace("\\\\", "\\")
    assert not JARGON.search(result.stderr)


SEEDED = [
    ["finetune", "highres", "--seed", "SEED"],
    ["finetune", "highres", "--set", "seed=SEED"],
    ["finetune", "vtab", "--seeds", "0,SEED"],
    ["finetune", "vtab", "--set", "seeds=[SEED]"],
    ["pretrain", "--seed", "SEED"],
    ["lit", "train", "--seed", "SEED"],
    ["lit", "cache", "--seed", "SEED"],
    ["segment", "ade20k", "--seed", "SEED"],
    ["segment", "folder", "--data", "demo", "--seed", "SEED"],
    ["checkpoint", "retrofit", "a.npz", "b.safetensors", "--data", "demo", "--seed", "SEED"],
    ["eval", "fewshot", "none", "--data", "demo", "--seeds", "1,SEED"],
]


@pytest.mark.parametrize("seed", [2**70, 2**32, -1])
@pytest.mark.parametrize("command", SEEDED, ids=" ".join)
def test_a_seed_out_of_range_is_refused_by_every_command(command: list[str], seed: int, tmp_path: Path) -> None:
    own = ["-o", str(tmp_path / "run")] if command[0] in ("finetune", "pretrain", "segment") else []
    result = run_dpn(*(word.replace("SEED", str(seed)) for word in command), *own)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.stderr
    assert re.search(r"from 0 to 4294967295", result.stderr)
    assert not (tmp_path / "run").exists()


SIZED = [
    ["finetune", "highres", "--data", "demo"],
    ["finetune", "vtab", "--data", "demo"],
    ["pretrain", "--data", "demo"],
    ["plan", "pretrain", "--arch", "B/16"],
    ["plan", "distill"],
    ["lit", "train", "--data", "demo"],
    ["lit", "cache", "--data", "demo"],
    ["segment", "ade20k", "--data", "demo"],
    ["segment", "folder", "--data", "demo"],
    ["eval", "run", "--data", "demo"],
    ["eval", "fewshot", "none", "--data", "demo"],
    ["checkpoint", "inspect", "x.npz"],
    ["checkpoint", "convert", "x.npz", "y.safetensors"],
    ["checkpoint", "retrofit", "x.npz", "y.safetensors", "--data", "demo"],
]


@pytest.mark.parametrize("command", SIZED, ids=" ".join)
def test_an_image_size_that_no_memory_holds_is_refused_by_every_command(command: list[str]) -> None:
    result = run_dpn(*command, "--image-size", "1000000000")
    assert result.exit_code == 2, result.output
    assert "16384" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.output


def test_help_of_pretraining_speaks_of_no_checkpoint() -> None:
    def page(*command: str) -> str:
        return " ".join(run_dpn(*command, "--help-all").stdout.replace("│", "").split())

    assert "the checkpoint's" in page("finetune", "highres")
    assert "the checkpoint's" not in page("pretrain") + page("plan", "pretrain")
