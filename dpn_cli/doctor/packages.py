"""The installed packages against the versions that dpn is tested with, which its own metadata lists."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from dpn_cli import __version__
from dpn_cli.doctor.result import Finding
from dpn_cli.run.environment import git_commit

OURS = "dpn-cli"
INSTALL = "pip install --upgrade '{}'"
TOGETHER = "install both in one command, so that they fit: pip install --force-reinstall '{}' torchvision"


def packages() -> Iterator[Finding]:
    """Yield Python, dpn itself, what is missing or outside the tested versions, and the extras that are there."""
    try:
        rows, python = metadata.requires(OURS) or [], str(metadata.metadata(OURS)["Requires-Python"])
    except metadata.PackageNotFoundError:
        yield Finding("Python", "ok", platform.python_version())
        yield Finding("dpn", "warning", f"{__version__}, not installed: tested versions unknown", "run 'pip install .'")
        return
    yield _python(python)
    yield Finding("dpn", "ok", __version__ + (f", commit {commit[:10]}" if (commit := git_commit()) else ""))
    required = [Requirement(row) for row in rows]
    always = [each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    wrong = [finding for each in always if (finding := _outside(each))]
    yield from wrong
    fitting = len(always) - len(wrong)
    yield Finding("packages", "ok", f"{fitting} of {len(always)} as dpn is tested")
    yield from _extras([each for each in required if each not in always])
    yield from _pair()


def installed(name: str) -> str | None:
    """Return the version of a package, without importing it; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    """Return the first line of an error, at most 300 characters; its kind where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _python(allowed: str) -> Finding:
    here = platform.python_version()
    if Requirement(f"python{allowed}").specifier.contains(here, prereleases=True):
        return Finding("Python", "ok", here)
    return Finding("Python", "problem", f"{here}, and dpn needs {allowed}", "make an environment with another Python")


def _outside(required: Requirement) -> Finding | None:
    """Describe a package that is missing, or of a version that dpn is not tested with."""
    wanted, here = f"{required.name}{required.specifier}", installed(required.name)
    if here is None:
        return Finding(required.name, "problem", "not installed", INSTALL.format(wanted))
    if required.specifier.contains(here, prereleases=True):
        return None
    return Finding(required.name, "warning", f"{here}, and dpn is tested with {wanted}", INSTALL.format(wanted))


def _extras(required: list[Requirement]) -> Iterator[Finding]:
    """Yield which extras are complete, and what of them is of another version than the tested ones."""
    names = {name for name in metadata.metadata(OURS).get_all("Provides-Extra") or [] if name != "dev"}
    there, wrong = [], list[Finding]()
    for extra in sorted(names):
        of_it = [each for each in required if each.marker and each.marker.evaluate({"extra": extra})]
        if all(installed(each.name) for each in of_it):
            there.append(extra)
            wrong += filter(None, map(_outside, of_it))
    yield from wrong
    missing = sorted(names - set(there))
    found = f"{', '.join(there) or 'none'}; not installed: {', '.join(missing) or 'none'}"
    yield Finding("extras", "ok", found)


def _pair() -> Iterator[Finding]:
    """Yield a problem where torchvision is built for another torch than the one that is installed."""
    here, vision = installed("torch"), installed("torchvision")
    wanted = [Requirement(row) for row in (metadata.requires("torchvision") or [] if vision else [])]
    for required in wanted:
        if here and required.name == "torch" and not required.specifier.contains(here, prereleases=True):
            yield Finding(
                "torchvision",
                "problem",
                f"{vision} is built for torch{required.specifier}, and torch {here} is installed",
                TOGETHER.format(f"torch{required.specifier}"),
            )
