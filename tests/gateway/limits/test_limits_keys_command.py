"""`sol gateway keys`: what it prints is a key that opens the gateway, and nothing else on standard output is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from sol.cli import main
from sol.errors import AuthenticationError
from sol.gateway.auth import Authenticator
from sol.gateway.call import Principal
from sol.gateway.config import read_config
from sol.gateway.limits.accounts import Accounts

FILE = """
models: [{name: m, engines: [a]}]
engines: [{name: a, url: "http://127.0.0.1:9", driver: sol}]
limits: {policies: {small: {requests_per_minute: 60}}}
database: {url: "sqlite:///DIRECTORY/sol.db", journal: DIRECTORY/journal}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "gateway.yaml"
    path.write_text(FILE.replace("DIRECTORY", str(tmp_path)))
    return path


async def who(config: Path, key: str) -> Principal:
    """Whom a gateway of this file takes the owner of the key for."""
    options = read_config(config).database
    assert options is not None
    accounts = Accounts(options)
    await accounts.start()
    try:
        return await Authenticator((), (accounts.keys,)).authenticate({"authorization": f"Bearer {key}"})
    finally:
        await accounts.close()


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["gateway", "keys", *words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def key(config: Path, capsys: pytest.CaptureFixture[str]) -> str:
    code, out, err = run(
        capsys, "create", "shop-1", "--config", str(config), "--tenant", "shop", "--limits", "small", "--model", "m",
        "--class", "realtime", "--default-class", "batch", "--expires", "2999-01-31", "--metadata", "team=front",
    )  # fmt: skip
    assert (code, err) == (0, "")
    return out.strip()


async def test_a_key_that_was_made_opens_the_gateway(config: Path, key: str) -> None:
    assert await who(config, key) == Principal(
        key_id="shop-1", tenant="shop", models=frozenset({"m"}), classes=("realtime",), default_class="batch",
        limits="small", metadata={"team": "front"},
    )  # fmt: skip


def test_keys_are_listed_without_what_opens(config: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, table, _ = run(capsys, "list", "--config", str(config))
    assert code == 0
    assert table.splitlines()[1].split()[:4] == ["shop-1", "shop", "small", "m"]
    code, lines, _ = run(capsys, "list", "--config", str(config), "--json")
    (entry,) = map(json.loads, lines.splitlines())
    assert (entry["id"], entry["expires_at"], entry["revoked_at"]) == ("shop-1", "2999-01-31T00:00:00+00:00", None)
    assert key not in table + lines


def test_a_revoked_key_opens_nothing(config: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--config", str(config), "keys", "revoke", "shop-1"]) == 0
    with pytest.raises(AuthenticationError, match="revoked"):
        asyncio.run(who(config, key))
    capsys.readouterr()
    assert "revoked" in run(capsys, "list", "--config", str(config))[1]
    code, _, err = run(capsys, "revoke", "shop-1", "--config", str(config))
    assert code == 2
    assert "no key 'shop-1' that is not revoked" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["shop-1"], "there is a key 'shop-1' already"),
        (["two words"], "one word"),
        (["b", "--limits", "smal"], "--limits: there is no 'smal'"),
        (["b", "--model", "n"], "--model: there is no 'n'"),
        (["b", "--class", "urgent"], "--class: there is no 'urgent'"),
        (["b", "--tenant", " "], "--tenant is empty"),
    ],
)
def test_what_would_be_a_useless_key_is_refused(
    config: Path, key: str, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "create", *words, "--config", str(config))
    assert (code, out) == (2, "")
    assert says in err
    assert len(run(capsys, "list", "--config", str(config), "--json")[1].splitlines()) == 1


def test_a_time_that_is_none_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("soon", "2001-01-01", "2999-01-01T12:00"):
        with pytest.raises(SystemExit):
            run(capsys, "create", "b", "--expires", text, "--config", str(config))
        assert repr(text) in capsys.readouterr().err


def test_without_a_database_there_is_nowhere_to_keep_them(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("\n".join(line for line in config.read_text().splitlines() if "database" not in line))
    code, _, err = run(capsys, "list", "--config", str(config))
    assert code == 2
    assert "has no database" in err
    assert "--config is missing" in run(capsys, "list")[2]
