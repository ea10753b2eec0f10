"""The installed packages against the versions that dpn is tested with, which its own metadata lists."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from dpn_cli import __version__
from dpn_cli.doctor.result import Finding
from dpn_cli.run.environment import git_commit

DPN = "dpn-cli"
INSTALL = "pip install --upgrade '{}'"
REINSTALL_BOTH = "install both in one command, so that they fit: pip install --force-reinstall '{}' torchvision"


def check_packages() -> Iterator[Finding]:
    """Yield findings about Python, dpn, packages that are missing or outside the tested versions, and extras."""
    try:
        rows, python = metadata.requires(DPN) or [], str(metadata.metadata(DPN)["Requires-Python"])
    except metadata.PackageNotFoundError:
        yield Finding("Python", "ok", platform.python_version())
        yield Finding("dpn", "warning", f"{__version__}, not installed: tested versions unknown", "run 'pip install .'")
        return
    yield _python(python)
    yield Finding("dpn", "ok", __version__ + (f", commit {commit[:10]}" if (commit := git_commit()) else ""))
    required = [Requirement(row) for row in rows]
    core = [
        requirement
        for requirement in required
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]
    problems = [finding for requirement in core if (finding := _check_version(requirement))]
    yield from problems
    installed_count = len(core) - len(problems)
    yield Finding("packages", "ok", f"{installed_count} of {len(core)} as dpn is tested")
    yield from _extras([requirement for requirement in required if requirement not in core])
    yield from _check_torchvision()


def installed_version(name: str) -> str | None:
    """Return the version of a package, without importing it; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    """Return the first line of an error, at most 300 characters; its class name if it has no message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _python(allowed: str) -> Finding:
    version = platform.python_version()
    if Requirement(f"python{allowed}").specifier.contains(version, prereleases=True):
        return Finding("Python", "ok", version)
    return Finding(
        "Python", "problem", f"{version}, and dpn needs {allowed}", "make an environment with another Python"
    )


def _check_version(required: Requirement) -> Finding | None:
    """Return a finding about a package that is missing or has an untested version; None if it fits."""
    expected, version = f"{required.name}{required.specifier}", installed_version(required.name)
    if version is None:
        return Finding(required.name, "problem", "not installed", INSTALL.format(expected))
    if required.specifier.contains(version, prereleases=True):
        return None
    return Finding(required.name, "warning", f"{version}, and dpn is tested with {expected}", INSTALL.format(expected))


def _extras(required: list[Requirement]) -> Iterator[Finding]:
    """Yield the complete extras, and their packages with untested versions."""
    names = {name for name in metadata.metadata(DPN).get_all("Provides-Extra") or [] if name != "dev"}
    complete, problems = [], list[Finding]()
    for extra in sorted(names):
        requirements = [
            requirement
            for requirement in required
            if requirement.marker and requirement.marker.evaluate({"extra": extra})
        ]
        if all(installed_version(requirement.name) for requirement in requirements):
            complete.append(extra)
            problems += filter(None, map(_check_version, requirements))
    yield from problems
    missing = sorted(names - set(complete))
    found = f"{', '.join(complete) or 'none'}; not installed: {', '.join(missing) or 'none'}"
    yield Finding("extras", "ok", found)


def _check_torchvision() -> Iterator[Finding]:
    """Yield a problem if torchvision is built for another torch than the installed one."""
    version, vision_version = installed_version("torch"), installed_version("torchvision")
    expected = [Requirement(row) for row in (metadata.requires("torchvision") or [] if vision_version else [])]
    for required in expected:
        if version and required.name == "torch" and not required.specifier.contains(version, prereleases=True):
            yield Finding(
                "torchvision",
                "problem",
                f"{vision_version} is built for torch{required.specifier}, and torch {version} is installed",
                REINSTALL_BOTH.format(f"torch{required.specifier}"),
            )
