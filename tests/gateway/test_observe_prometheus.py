"""Rules and dashboards against a real Prometheus that reads a real gateway; without one these are skipped."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from gateway_harness import CHAT, COMPLETION, Running, running

from sol.engines.service import free_port

DEPLOY = Path(__file__).parents[2] / "sol" / "deploy"
RULES = DEPLOY / "prometheus" / "gateway.rules.yaml"
PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
METRICS_TABLE = re.compile(r"^\| metric \(`sol_gateway_…`\).*?\n\n", re.MULTILINE | re.DOTALL)
KEPT_EMPTY = {
    "absent(sol_gateway_info)": "it says that there is none, and here there is one",
}
"""Expressions that have no series in a run in which all is well, and why."""

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="there is no Prometheus here (apt-get install prometheus)",
)


def promtool(*arguments: str | Path, text: str | None = None) -> None:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_the_example_of_a_configuration_are_sound() -> None:
    promtool("check", "rules", "--lint-fatal", RULES)
    promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yaml")


def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    text = (Path(__file__).parent / "observe_alerts.yaml").read_text()
    cases = tmp_path / "alerts.yaml"
    cases.write_text(text.replace("RULES", str(RULES)))
    promtool("test", "rules", cases)


async def test_every_expression_of_rules_and_dashboard_has_series(tmp_path: Path) -> None:
    async with observed(tmp_path) as (gateway, prometheus):
        await until(prometheus, "up")  # it begins five seconds after it is ready
        await some_traffic(gateway)
        text = await page(gateway)
        promtool("check", "metrics", text=text)
        assert set(re.findall(r"^# TYPE (sol_gateway_\w+)", text, re.MULTILINE)) == documented()
        await until(prometheus, "sol_gateway:failed_ratio:rate5m")

        rules = (await prometheus.get("/api/v1/rules")).json()["data"]["groups"]
        assert {rule["name"]: rule.get("lastError", "") for group in rules for rule in group["rules"]
                if rule["health"] != "ok"} == {}  # fmt: skip
        empty = [expression for expression in expressions() if not await series(prometheus, expression)]
        assert empty == list(KEPT_EMPTY)


def documented() -> set[str]:
    """Metrics in the table of the page about them."""
    table = METRICS_TABLE.search(PAGE)
    assert table is not None
    rows = re.findall(r"^\| (`[a-z_0-9]+`(?:, `[a-z_0-9]+`)*) \|", table.group(), re.MULTILINE)
    return {f"sol_gateway_{name}" for row in rows for name in re.findall(r"`(\w+)`", row)}


def expressions() -> Iterator[str]:
    """Each that is to have series: alerts' without the bound that makes them fire."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield re.sub(r"\s(==|>=|>)\s[0-9.]+(?=$|\s(and|for)\b)", "", rule["expr"].strip())
    for panel in json.loads((DEPLOY / "grafana" / "gateway.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            plain = target["expr"].replace("$__rate_interval", "20s").replace("$model", ".*").replace("$class", ".*")
            assert "$" not in plain
            yield plain


async def series(prometheus: httpx.AsyncClient, expression: str) -> list[Any]:
    answer = (await prometheus.get("/api/v1/query", params={"query": expression})).json()
    assert answer["status"] == "success", (expression, answer)
    found: list[Any] = answer["data"]["result"]
    return found


async def page(gateway: Running) -> str:
    answer = await gateway.http.get("/metrics", headers={"authorization": "Bearer metrics"})
    assert answer.status_code == 200
    return answer.text


async def some_traffic(gateway: Running) -> None:
    """Of every kind, for as long as rates need."""
    for _ in range(6):
        shop, small = ({"authorization": f"Bearer {key}"} for key in ("shop", "small"))
        for body in (CHAT, {**CHAT, "stream": True}, {**CHAT, "model": "none"}, {**COMPLETION, "prompt": "zebra"}):
            await gateway.http.post(
                "/v1/chat/completions" if "messages" in body else "/v1/completions", json=body, headers=shop
            )
        await gateway.http.post("/v1/completions", json=COMPLETION, headers=small)
        await asyncio.sleep(0.3)


async def until(prometheus: httpx.AsyncClient, expression: str) -> None:
    """There is something to see."""
    for _ in range(200):
        if await series(prometheus, expression):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"no series of {expression} came")


@asynccontextmanager
async def observed(directory: Path) -> AsyncIterator[tuple[Running, httpx.AsyncClient]]:
    """A gateway with all that has metrics, and a Prometheus that reads it twice a second."""
    sections: dict[str, Any] = {
        "engine": {"spec": {"model": "m", "max_num_seqs": 16}},
        "laws": {"num_speculative_tokens": 2},
        "keys": [{"key": "shop", "tenant": "shop"}, {"key": "small", "limits": "small"}],
        "limits": {
            "policies": {"small": {"requests_per_minute": 2}},
            "redis": {"url": f"redis://127.0.0.1:{free_port('127.0.0.1')}/0"},
        },
        "prices": {"m": {"input": 1, "output": 2}},
        "database": {"url": f"sqlite:///{directory / 'sol.db'}", "journal": str(directory / "usage")},
        "filters": [{"name": "animals", "kind": "words", "words": ["zebra"]}],
        "sla": {"levels": [{"ttft": {"p95": 0.5}, "errors": 0.01}]},
        "degradation": [{"action": "shed"}],
        "routing": {"health": {"interval": 0.5}},
        "observe": {
            "metrics": {"token": "metrics"},
            "log": {"requests": True, "file": str(directory / "requests.log")},
        },
    }
    async with running(2, **sections) as gateway:
        port = free_port("127.0.0.1")
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(configuration(gateway.server.url)))
        process = await asyncio.create_subprocess_exec(
            "prometheus", f"--config.file={directory / 'prometheus.yaml'}", "--log.level=error",
            f"--storage.tsdb.path={directory / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}",
        )  # fmt: skip
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as prometheus:
                await until_ready(prometheus)
                yield gateway, prometheus
        finally:
            process.terminate()
            await process.wait()


def configuration(url: str) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "sol-gateway",
                "authorization": {"credentials": "metrics"},
                "static_configs": [{"targets": [url.removeprefix("http://")]}],
            }
        ],
    }


async def until_ready(prometheus: httpx.AsyncClient) -> None:
    for _ in range(200):
        try:
            if (await prometheus.get("/-/ready")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.05)
    raise AssertionError("Prometheus does not become ready")
