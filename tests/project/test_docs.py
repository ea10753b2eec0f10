"""README, CONTRIBUTING and docs: the commands are ones that the program takes, the links lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from typer.testing import CliRunner

from dpn_cli.arch import NORMS
from dpn_cli.cli import app
from dpn_cli.engine import planning
from dpn_cli.weights.formats import FORMATS
from support.docs import FENCE, SHELL, read_code_blocks, split_command
from support.programs import ROOT

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("dpn", "torchrun", "make", "pip", "python", "time")


def in_blocks(text: str) -> list[str]:
    """Return the commands in a page's shell blocks, with continued lines joined."""
    lines = (
        "\n".join(body for language, body in read_code_blocks(text) if language in SHELL)
        .replace("\\\n", " ")
        .splitlines()
    )
    return [line.removeprefix("$ ") for line in lines if line.removeprefix("$ ").split(" ")[0] in PROGRAMS]


def in_sentences(text: str) -> list[str]:
    """Return the commands that stand in the middle of a page's sentences and tables."""
    spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", FENCE.sub("", text))
    return [
        " ".join(span.split())
        for span in spans
        if "…" not in span and span.split()[0] in PROGRAMS and span not in PROGRAMS
    ]


def cases(find: Any) -> list[Any]:
    """Return each command of all pages once, with the page's name for the report."""
    actual = {line: page for page in reversed(PAGES) for line in find(page.read_text(encoding="utf-8"))}
    return [pytest.param(line, id=f"{page.name}: {line[:60]}") for line, page in sorted(actual.items())]


def parsed(words: list[str]) -> dict[str, Any]:
    """Parse the words behind ``dpn`` as the program does, without running anything; returns what the command was given.

    Raises the parser's error for an option, a command or a value that there is not.
    """
    command: Any = typer.main.get_command(app)
    if words[0].startswith("-"):  # the options of dpn itself act while they are parsed
        assert words in [[option] for parameter in command.params for option in (*parameter.opts, "--help")]
        return {}
    context = command.make_context("dpn", list(words))
    while hasattr(command, "commands"):
        remaining = [*context._protected_args, *context.args]
        if not remaining:
            break  # a group by itself, such as 'dpn configs'
        name, command, remaining = command.resolve_command(context, remaining)
        context = command.make_context(name, list(remaining), parent=context)
    return dict(context.params)


def check(words: list[str]) -> None:
    """Assert that a command of any of our programs is one that works."""
    program, *remaining = words
    if program == "torchrun":
        place = remaining.index("dpn")
        from torch.distributed.run import get_args_parser

        get_args_parser().parse_args([*remaining[:place], "dpn"])
        program, *remaining = remaining[place:]
    if program == "dpn":
        parsed(remaining)
    elif program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in remaining if "=" not in word} <= targets
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = re.findall(r"(?:\.|dpn-cli)\[([\w,]+)\]", " ".join(remaining))
        assert {name for group in extras for name in group.split(",")} <= set(project["optional-dependencies"])
        assert remaining[0] == "install"
    elif remaining[0] != "-m":
        script = ROOT / remaining[0]
        assert script.is_file()
        options = {word for word in remaining[1:] if word.startswith("--")}
        assert all(f'"{option}"' in script.read_text() for option in options), options


@pytest.mark.parametrize("line", cases(in_blocks))
def test_commands_are_ones_that_the_program_takes(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = split_command(line)
    check(words)
    if "dpn" in words and "print_config" in parsed(words := words[words.index("dpn") + 1 :]):
        monkeypatch.chdir(tmp_path)
        result = CliRunner().invoke(app, [*words, "--print-config"])
        assert result.exit_code == 0, result.output
        assert "schedule:" in result.stdout


@pytest.mark.parametrize("line", cases(in_sentences))
def test_commands_in_sentences_have_known_names_and_options(line: str) -> None:
    words = [word for word in split_command(line) if word not in {"DIR", "FILE", "N"}]
    try:
        check(words)
    except typer.TyperException as error:
        if type(error).__name__ not in {"MissingParameter", "NoArgsIsHelpError"}:  # a sentence may leave something out
            raise


@pytest.mark.parametrize(
    "words", [["finetune", "vtb"], ["finetune", "vtab", "--stesp", "4"], ["eval", "fewshot", "--shots"], ["segmnt"]]
)
def test_the_parser_of_this_test_refuses_wrong_commands(words: list[str]) -> None:
    with pytest.raises(typer.TyperException):
        check(["dpn", *words])


@pytest.mark.parametrize(
    "line",
    [
        "dpn configs",
        "dpn configs show vtab",
        "dpn plan pretrain --arch B/16 --images 1268355",
        "dpn finetune highres",
        "dpn pretrain",
    ],
)
def test_demo_commands_run(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(line in in_blocks_without_comments(page) for page in PAGES), "it is in none of the pages any more"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(planning, "MEASURED_SECONDS", 0.001)
    words = split_command(line)[1:]
    result = CliRunner().invoke(app, [*words, *(["--dry-run"] if "dry_run" in parsed(words) else [])])
    assert result.exit_code == 0, result.output
    assert result.output


def in_blocks_without_comments(page: Path) -> list[str]:
    return [shlex.join(split_command(line)) for line in in_blocks(page.read_text(encoding="utf-8"))]


def test_readme_can_be_read_in_one_sitting_and_has_the_two_commands() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    first = next(body for language, body in read_code_blocks(text) if language in SHELL)
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]
    assert len(re.findall(r"!\[[^\]]+\]\([^)]+\)", text)) == 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_shell_commands_stand_in_shell_blocks(page: Path) -> None:
    for language, body in read_code_blocks(page.read_text(encoding="utf-8")):
        if language not in SHELL:
            assert not re.search(r"^(\$ )?(dpn|make|pip|python|torchrun) [a-z./-]+( --|$)", body, re.MULTILINE), body


PYTHON = [
    pytest.param(body, id=f"{page.name}: {body.splitlines()[0]}")
    for page in PAGES
    for language, body in read_code_blocks(page.read_text(encoding="utf-8"))
    if language == "python" and not body.startswith("# ")  # a file of CONTRIBUTING.md's examples
]


@pytest.mark.parametrize("code", PYTHON)
def test_python_blocks_compile_and_their_imports_exist(code: str) -> None:
    imports = [node for node in ast.parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports
    exec("\n".join(ast.unparse(line) for line in imports), {})


def anchors(page: Path) -> set[str]:
    """Return the anchors that a page's headings have on GitHub."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


def options(command: Any) -> set[str]:
    """Return every option of a command and of those below it."""
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(options(below) for below in getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_options_that_sentences_name_exist(page: Path) -> None:
    known = options(typer.main.get_command(app)) | {"--help"}
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text(encoding="utf-8")))
    for span in spans:
        if re.fullmatch(r"(benchmarks|configs|dpn_cli|tasks|tests)/[\w./-]*", span):
            assert (ROOT / span).exists(), span
        if re.match(r"--[a-z]", span):
            assert span.split()[0].split("=")[0] in known, span


def test_every_page_can_be_reached_from_the_readme() -> None:
    """The site has the pages of docs/ alone, so these do not name others."""
    observed, todo = set[Path](), [README]
    while todo:
        page = todo.pop()
        if page in observed or page.suffix != ".md" or not page.is_file():
            continue
        observed.add(page)
        targets = re.findall(r"\]\(([^)\s#]+)[^)]*\)", FENCE.sub("", page.read_text(encoding="utf-8")))
        todo += [(page.parent / target).resolve() for target in targets if "://" not in target]
    assert set(PAGES) <= observed
    assert not [page for page in PAGES[2:] if "../README" in page.read_text(encoding="utf-8")]


def read_table(page: str, header: str) -> list[list[str]]:
    """Return the cells of the rows below the table header that begins with `header`."""
    lines = iter((ROOT / "docs" / page).read_text(encoding="utf-8").splitlines())
    next(line for line in lines if line.startswith(header))
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines))
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]


def test_every_norm_has_a_row_in_the_documentation() -> None:
    assert [row[0].strip("`") for row in read_table("norms.md", "| `--norm` |")] == list(NORMS)


def test_every_weight_format_has_a_row_in_the_documentation() -> None:
    rows = [row[0].lower().replace("`", "") for row in read_table("weights.md", "| format | stems |")]
    titles = {"open_clip (timm trunk)": "timm trunks", "DTN": "dynamic token normalization", "SLAB": "slab's"}
    for weight_format in FORMATS:
        assert any(titles.get(weight_format.name, weight_format.name).lower() in row for row in rows)


def test_the_page_of_commands_is_that_of_the_program() -> None:
    """It has every option of every command, and no other."""
    spec = importlib.util.spec_from_file_location("make_commands", ROOT / "docs" / "make_commands.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run: python docs/make_commands.py"


def test_the_site_has_every_page() -> None:
    def pages(entries: list[Any]) -> list[str]:
        found = []
        for entry in entries:
            for value in [entry] if isinstance(entry, str) else entry.values():
                found += [value] if isinstance(value, str) else pages(value)
        return found

    site = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    written = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert sorted(pages(site["nav"])) == written
