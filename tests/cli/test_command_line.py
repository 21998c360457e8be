"""`sol` as a program: what it prints, how it exits, and that asking for help loads nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sol.cli import main
from sol.version import __version__


def run(*words: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sol", *words] if code is None else [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"sol {__version__}")


def test_help_names_every_command_and_loads_nothing() -> None:
    done = run(
        code="import sys; from sol.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "heavy = {'torch', 'numpy', 'rich', 'starlette', 'pydantic', 'zmq', 'msgspec', 'jinja2', 'tokenizers'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    assert done.returncode == 0, done.stderr
    for command in ("serve", "generate", "chat", "pull", "doctor", "verify"):
        assert f"\n    {command} " in done.stdout


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "pull", "doctor", "verify"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert f"usage: sol {command}" in capsys.readouterr().out


def test_without_a_command_it_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_a_missing_extra_is_named() -> None:
    done = run(
        code="import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('uvicorn', 'rich'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "from sol.cli import main\n"
        "print(main(['serve', '--port', '0']), main(['chat']))"
    )
    assert done.stdout.strip() == "2 2"
    assert 'this command needs uvicorn, which is not installed: pip install "sol-inference[serve]"' in done.stderr
    assert "this command needs rich" in done.stderr
    assert "Traceback" not in done.stderr


def test_any_other_missing_module_is_a_defect_and_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'sol.nothing'", name="sol.nothing")

    monkeypatch.setattr("sol.models.source.resolve", fail)
    with pytest.raises(ModuleNotFoundError):
        main(["pull"])


def test_a_reader_who_leaves_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -c 'import sys; from sol.cli import main, pull\n"
        "pull.run = lambda args: [print(\"x\" * 99) for _ in range(9999)] and 0\n"
        "sys.exit(main([\"pull\"]))' | true; exit ${PIPESTATUS[0]}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 141
    assert done.stderr == ""


def test_a_full_disk_is_no_traceback() -> None:
    program = (
        "import sys; from sol.cli import main, pull; pull.run = lambda args: print('x') or 0; sys.exit(main(['pull']))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 2
    assert done.stderr == "sol: error: the output cannot be written: No space left on device\n"


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sol.models.source.resolve", interrupt)
    assert main(["pull"]) == 130
