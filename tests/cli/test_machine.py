"""What `sol doctor` and the benchmarks say of a machine, from made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

from sol.cli.machine import inspect_machine, installed_version, package_versions


def make(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


X86 = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 7763\nflags\t\t: fpu avx2 fma f16c sse2\n",
    "proc/meminfo": "MemTotal:       16000000 kB\nMemFree:         1000 kB\nMemAvailable:    9000000 kB\n",
    "etc/os-release": 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
    "proc/self/cgroup": "0::/system.slice/sol.service\n",
}


def test_a_plain_machine(tmp_path: Path) -> None:
    machine = inspect_machine(make(tmp_path, X86))
    assert machine.cpu == "AMD EPYC 7763"
    assert machine.instruction_sets == ("avx2", "fma", "f16c")
    assert machine.memory_bytes == 16000000 * 1024
    assert machine.available_bytes == 9000000 * 1024
    assert machine.memory_limit_bytes is None
    assert machine.nvidia_driver is None
    assert machine.os.startswith("Debian GNU/Linux 12 (bookworm), Linux ")
    assert 1 <= machine.usable_cores <= machine.cores


def test_an_arm_machine_and_a_driver(tmp_path: Path) -> None:
    files = {
        "proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd asimddp bf16 i8mm\nModel\t\t: Raspberry Pi 5\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 1\n",
    }
    machine = inspect_machine(make(tmp_path, files))
    assert machine.cpu == "Raspberry Pi 5"
    assert machine.instruction_sets == ("asimd", "asimddp", "i8mm", "bf16")
    assert machine.nvidia_driver == "570.86.15"


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    machine = inspect_machine(tmp_path)
    assert machine.cpu
    assert machine.memory_bytes == 0
    assert machine.usable_cores >= 1


def test_the_cgroups_limits_count(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/system.slice/sol.service/cpu.max": "max 100000\n",
        "sys/fs/cgroup/system.slice/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/system.slice/memory.max": "2000000000\n",
    }
    machine = inspect_machine(make(tmp_path, X86 | files))
    assert machine.usable_cores == 0.5
    assert machine.memory_limit_bytes == 2000000000


def test_versions() -> None:
    versions = package_versions()
    assert versions["torch"] == installed_version("torch")
    assert {"numpy", "tokenizers", "starlette", "pyzmq"} <= versions.keys()
    assert "pytest" not in versions, "what only tests need is not asked of users"
    assert installed_version("no-such-package-at-all") is None
