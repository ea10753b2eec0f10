"""`dpn doctor`: what is wrong with packages, torch, GPUs, folders and ranks is named with a remedy."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import resource
import shutil
import socket
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from dpn_cli.commands import doctor
from dpn_cli.doctor import devices, machine, packages, ranks, storage, subprocess_check
from dpn_cli.doctor.result import Finding
from dpn_cli.run import cores, distributed
from dpn_cli.run.distributed import World
from support.cli import run_dpn
from support.programs import ROOT, program_environment, run_program
from support.ranks import run_distributed

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
MISSING = "raise OSError('libcudart.so.13: cannot open shared object file: No such file or directory')"
UNMATCHED = "raise RuntimeError('operator torchvision::nms does not exist')"
NOT_TORCH = "x = 1"


@pytest.mark.parametrize(
    ("name", "text", "actual", "remedy", "behind"),
    [
        ("torchvision", UNMATCHED, "operator torchvision::nms does not exist", "install both in one command", "ranks"),
        ("torch", MISSING, "cannot be imported: libcudart.so.13", "unset LD_LIBRARY_PATH", "torch"),
        ("torch", KILLED, "was killed by SIGKILL", "python -X faulthandler", "torch"),
        ("torch", NOT_TORCH, "torch/__init__.py is imported in its place", "rename that file", "torch"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_one_problem_among_the_findings(
    name: str, text: str, actual: str, remedy: str, behind: str, tmp_path: Path
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    completed = run_program(
        [sys.executable, "-m", "dpn_cli", "doctor", "--json"], env=program_environment(PYTHONPATH=path)
    )
    assert completed.returncode == 3, completed.stderr
    assert completed.stderr == "error: 1 problem, as listed above\n"
    result = json.loads(completed.stdout)
    (problem,) = [finding for finding in result["findings"] if finding["level"] == "problem"]
    assert problem["name"] == name
    assert actual in problem["found"]
    assert remedy in problem["remedy"]
    assert result["problems"] == 1
    names = [item["name"] for item in result["findings"]]
    assert {"Python", "packages", "memory", "runs", "hub"} < set(names)  # what needs no torch is told all the same
    assert names[-1] == behind


def test_a_healthy_machine_has_no_problem_and_every_check_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = [Finding("torch", "ok", "2"), Finding("hub", "warning", "away", "fetch it")]
    monkeypatch.setattr(doctor, "examine", lambda: actual)
    result = run_dpn("doctor")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "ok       torch  2",
        "warning  hub    away",
        "                -> fetch it",
        "0 problems, 1 warning",
    ]


def _named(findings: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_packages_are_compared_with_the_ranges_of_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"timm": "1.2.0", "torch": "2.15.0+cu132", "torchvision": "0.26.0", "typer": "0.30.0rc1"}
    rows = {
        packages.DPN: [
            "timm<1.1,>=1.0.31",
            "torch>=2.11",
            "typer<1,>=0.29",
            "einops>=0.8",
            "ray>=2; extra == 'ray'",
        ],
        "torchvision": ["numpy", "torch (==2.11.0)"],
    }
    about = metadata.metadata(packages.DPN)
    monkeypatch.setattr(metadata, "requires", rows.get)
    monkeypatch.setattr(metadata, "metadata", lambda name: about)
    monkeypatch.setattr(packages, "installed_version", versions.get)
    actual = _named(packages.check_packages())
    assert actual["timm"].level == "warning"
    assert "1.2.0, and dpn is tested with timm<1.1,>=1.0.31" in actual["timm"].found
    assert actual["timm"].remedy == "pip install --upgrade 'timm<1.1,>=1.0.31'"
    assert (actual["einops"].level, actual["einops"].found) == ("problem", "not installed")
    assert actual["packages"].found.startswith("2 of 4")
    assert "torch" not in actual
    assert "typer" not in actual
    assert actual["torchvision"].found == "0.26.0 is built for torch==2.11.0, and torch 2.15.0+cu132 is installed"
    assert "'torch==2.11.0' torchvision" in actual["torchvision"].remedy
    assert "not installed:" in actual["extras"].found
    versions.update(torch="2.11.0+cu130")  # a build's own suffix is the same version
    assert "torchvision" not in _named(packages.check_packages())


def test_an_old_python_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: "3.9.1")
    actual = _named(packages.check_packages())["Python"]
    assert (actual.level, actual.found) == ("problem", "3.9.1, and dpn needs >=3.11")


@pytest.mark.parametrize("version", [1, 2])
def test_the_limits_of_a_container_are_seen(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, own = tmp_path / "groups", tmp_path / "cgroup"
    monkeypatch.setattr(machine, "GROUPS", root)
    monkeypatch.setattr(machine, "PROCESS_GROUPS", own)
    monkeypatch.setattr(machine, "cores", lambda: list(range(16)))
    if version == 2:
        own.write_text("0::/a/b\n")
        files = {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000", "a/b/memory.max": "3000000000"}
    else:
        own.write_text("3:cpu,cpuacct:/a\n4:memory:/a\n")
        files = {
            "cpu/a/cpu.cfs_quota_us": "250000",
            "cpu/a/cpu.cfs_period_us": "100000",
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/a/memory.limit_in_bytes": "3000000000",
        }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    actual = _named(machine.check_machine())
    assert actual["cores"].level == "warning"
    assert "may use 2.5 of them" in actual["cores"].found
    assert "-j 2" in actual["cores"].remedy
    assert actual["memory"].level == "warning"
    assert "of 3.0 GB available" in actual["memory"].found


def test_little_shared_memory_and_few_open_files_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(cores, "SHARED", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=64 * 10**6))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    actual = _named(machine.check_machine())
    assert actual["shared memory"].level == "warning"
    assert "64 MB free" in actual["shared memory"].found
    assert "--shm-size" in actual["shared memory"].remedy
    assert actual["open files"].remedy == "have the limit of 256 raised, or pass -j 0"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    assert _named(machine.check_machine())["open files"].remedy == "run 'ulimit -n 1024' first"


def test_read_only_folders_and_full_disks_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "data" / "imagenet").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPN_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setenv("DPN_DATA_DIR", str(tmp_path / "data"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    actual = _named(storage.check_storage())
    assert actual["dpn's files"].level == "problem"
    assert "Not a directory" in actual["dpn's files"].found
    assert "DPN_HOME" in actual["dpn's files"].remedy
    assert actual["runs"].level == "warning"
    assert "1.0 GB free" in actual["runs"].found
    assert actual["hub"].level == "ok"  # the tests ask for no network
    assert actual["data"].found == str(tmp_path / "data" / "imagenet")
    assert not (tmp_path / "runs").exists()  # nothing is left behind


def test_a_gpu_that_torch_cannot_use_is_reported_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old (found version 11040).\nMore.", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    monkeypatch.setattr(devices, "DRIVER", (tmp_path / "none",))
    assert [finding.level for finding in devices.check_gpus()] == ["ok"]
    monkeypatch.setattr(devices, "DRIVER", (tmp_path,))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (actual,) = devices.check_gpus()
    assert actual.level == "problem"
    assert actual.found.endswith("the NVIDIA driver on your system is too old (found version 11040)."[1:])
    assert "update NVIDIA's driver" in actual.remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    (actual,) = devices.check_gpus()
    assert (actual.level, actual.remedy) == ("warning", "unset CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.version, "cuda", None)
    (actual,) = devices.check_gpus()
    assert "is built without CUDA" in actual.found


def test_a_gpu_without_kernels_or_in_use_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = [9 * 10**9, 80 * 10**9]

    class Properties:
        name, major, minor = "A GPU", 6, 1

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: memory)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    random = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *sides, device: random(*sides))
    (actual,) = devices.check_gpus()
    assert actual.level == "warning"
    assert "9.0 GB of 80.0 GB free; other programs use it" in actual.found
    monkeypatch.setenv("LOCAL_RANK", "1")  # each rank looks at its own
    assert list(devices.check_gpus()) == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    memory[0] = 79 * 10**9
    assert [finding.level for finding in devices.check_gpus()] == ["ok"]

    def no_kernel(*sides: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    monkeypatch.setattr(torch, "randn", no_kernel)
    (actual,) = devices.check_gpus()
    assert (actual.level, actual.name) == ("problem", "GPU 0")
    assert "no kernel image" in actual.found
    assert "sm_75, sm_80" in actual.remedy


@pytest.mark.parametrize(("native", "level"), [(True, "ok"), (False, "warning")])
def test_emulated_bf16_is_warned_of(native: bool, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or native)
    assert [finding.level for finding in devices.check_precision()] == [level]


def test_a_missing_compiler_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    (actual,) = devices.check_compiler()
    assert (actual.level, actual.remedy) == ("warning", "install it, or leave --compile out")


def _meet(world: World, folder: Path) -> None:
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(world.rank), "LOCAL_RANK": str(world.rank)}
    mine = [Finding("memory", "warning", "little", "more"), Finding("hub", "warning", f"by rank {world.rank}", "x")]
    if world.rank:
        mine[0] = Finding("memory", "ok", "enough")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: ["here", "elsewhere"][world.rank])
        patch.setattr(ranks, "versions", lambda: {"torch": ["2.0", "1.0"][world.rank]})
        actual = list(ranks.check_ranks(mine))
    (folder / f"{world.rank}.json").write_text(json.dumps([[match.name, match.level, match.found] for match in actual]))


@pytest.mark.slow
def test_ranks_report_each_other_their_versions_and_findings(tmp_path: Path) -> None:
    run_distributed(_meet, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert [row[:2] for row in first] == [row[:2] for row in second]
    (met, unlike, told) = first
    assert met[:2] == ["ranks", "ok"]
    assert "2 ranks on 2 machines meet over gloo" in met[2]
    assert unlike == ["rank 1, elsewhere", "problem", unlike[2]]
    assert "torch 1.0, not 2.0" in unlike[2]
    assert told == ["rank 1, elsewhere: hub", "warning", "by rank 1"]


def test_ranks_that_do_not_meet_and_too_many_ranks_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> Any:
        raise RuntimeError("The client socket has timed out after 60000ms\nmore")

    monkeypatch.setattr(distributed, "join", lost)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    (actual,) = ranks.check_ranks([])
    assert actual.level == "problem"
    assert actual.found == "rank 3 of 8 does not reach the others: The client socket has timed out after 60000ms"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    (actual,) = ranks.check_ranks([])
    assert actual.found == "8 ranks on this machine, and 4 GPUs"
    assert actual.remedy == "start torchrun with --nproc-per-node 4"


def test_only_the_leading_rank_prints_when_the_ranks_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = [Finding("ranks", "ok", "2 ranks")]
    monkeypatch.setattr(doctor, "examine", lambda: actual)
    monkeypatch.setenv("RANK", "1")
    assert run_dpn("doctor").output == ""
    actual[0] = Finding("ranks", "problem", "lost", "x")
    result = run_dpn("doctor")
    assert result.exit_code == 3
    assert "lost" in result.stdout


def test_a_device_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_check, "STEP_TIMEOUT", 0.01)
    actual, expected = multiprocessing.Pipe()
    for message in ("torch", Finding("torch", "ok", "2"), "GPU"):
        expected.send(message)
    result = [
        (item.name, item.level, item.found)
        for item in subprocess_check.SubprocessCheck(multiprocessing.current_process(), actual, tmp_path).findings([])
    ]
    assert result == [("torch", "ok", "2"), ("GPU", "problem", "no response in 0 s")]
