"""Configurations in an engine's own words, the model of the machine, and the files that come of a search."""

from __future__ import annotations

import asyncio
import html.parser
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from simulated_tuning import Troubled, goal, small_space

from sol.bench.slo import parse_slo
from sol.cli import build_parser
from sol.cli.serve import server_config
from sol.config import EngineConfig
from sol.errors import ConfigError
from sol.models.config import load_model_config
from sol.models.source import resolve
from sol.tune import Search, TuneResult, tune
from sol.tune.engines import Target, Variation, default_config, engine_space, serve_options
from sol.tune.machine import inspect
from sol.tune.output import command_line, to_json, to_yaml
from sol.tune.report import to_html
from sol.tune.roofline import Machine, Roofline

DRAFTED = {"method": "ngram", "num_speculative_tokens": 4, "options": {"prompt_lookup_max": 3}}


def test_what_is_written_for_sol_serve_is_what_it_reads(tmp_path: Path) -> None:
    target = Target(engine="sol", model="org/name", options={"max_model_len": 512})
    config = {
        "max_num_seqs": 7, "enable_prefix_caching": False, "quantization": None, "speculation": DRAFTED,
        "kv_cache_dtype": "auto",
    }  # fmt: skip
    path = tmp_path / "best.yaml"
    path.write_text(to_yaml(serve_options(target, config), "the best\nof all"))
    read = server_config(build_parser().parse_args(["serve", "--config", str(path)]))
    assert read.engine == EngineConfig(
        model="org/name", max_model_len=512, max_num_seqs=7, enable_prefix_caching=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["sol", "vllm"])
def test_every_usual_value_has_a_command_line(engine: Any) -> None:
    target = Target(engine=engine, model="org/name", extra_args=("--seed", "3"))
    space = engine_space(target, speculative_model="org/small", on_cpu=False)
    assert default_config(space, engine, on_cpu=False) in space
    for parameter in space.parameters:
        for value in parameter.values:
            config = {**default_config(space, engine, on_cpu=False), parameter.name: value}
            words = shlex.split(command_line(target, config))
            assert words[-2:] == ["--seed", "3"]
            if engine == "sol":
                options = build_parser().parse_args(words[words.index("serve") :])
                server_config(options)


def test_vllms_command_line() -> None:
    target = Target(engine="vllm", model="org/name")
    words = shlex.split(command_line(target, {"max_num_seqs": 64, "speculation": DRAFTED, "quantization": "fp8"}))
    assert words[:3] == ["vllm", "serve", "org/name"]
    assert words[words.index("--max-num-seqs") + 1] == "64"
    assert json.loads(words[words.index("--speculative-config") + 1])["prompt_lookup_max"] == 3


def test_values_that_are_given_take_the_place_of_the_usual_ones() -> None:
    target = Target(engine="sol", model="org/name")
    given = [
        Variation.parse("max-num-seqs=32,8"),
        Variation.parse('speculation=["off", {"method": "suffix"}]'),
        Variation.parse("quantization=int8,int4"),
        Variation.parse("enable_prefix_caching=true"),
    ]
    space = engine_space(target, variations=given)
    values = space.describe()
    assert values["max_num_seqs"] == [8, 32]
    assert values["speculation"] == ["off", {"method": "suffix"}]
    assert values["quantization"] == [None, "int8", "int4"], "what they are compared with comes along"
    assert values["enable_prefix_caching"] == [True]
    assert "quantization" not in engine_space(target, quantized=True).describe()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_num_seqs", "vary must be like max_num_seqs=8,16,32"),
        ("colour=red", "'colour' is none of max_num_seqs"),
        ("speculation=[off]", "is no JSON list"),
        ("max_num_seqs=0", "greater than or equal to 1"),
        ("quantization=int9", "quantization of Sol must be one of"),
        ('speculation=[{"method": "oracle"}]', "speculation.method of Sol must be one of"),
    ],
)
def test_values_that_no_engine_takes(text: str, says: str) -> None:
    target = Target(engine="sol", model="org/name")
    with pytest.raises(ConfigError) as caught:
        engine_space(target, variations=[Variation.parse(text)])
    assert says in caught.value.message


def test_words_of_variations() -> None:
    assert Variation.parse("enable_prefix_caching=on,off").values == (True, False)
    assert Variation.parse("speculation=on,none").values == ("auto", "off")
    assert Variation.parse("quantization=none,int8").values == (None, "int8")
    assert Variation.parse("gpu-memory-utilization=0.8,0.9").values == (0.8, 0.9)


@pytest.mark.parametrize(
    ("words", "variations", "says"),
    [
        (("--max-num-seqs", "4"), (), "engine_args has --max-num-seqs, and max_num_seqs is varied"),
        (("--no-enable-prefix-caching",), (), "enable_prefix_caching is varied"),
        (("--speculative-config={}",), (), "speculation is varied"),
        ((), ("block_size=16", "block-size=32"), "block_size is given twice"),
    ],
)
def test_nothing_is_given_in_two_places(words: tuple[str, ...], variations: tuple[str, ...], says: str) -> None:
    target = Target(engine="sol", model="org/name", extra_args=words)
    with pytest.raises(ConfigError) as caught:
        engine_space(target, variations=[Variation.parse(text) for text in variations])
    assert says in caught.value.message


def test_the_roofline_excludes_what_cannot_be_and_nothing_else(talking_llama: Path) -> None:
    model = load_model_config(resolve(str(talking_llama)))
    fits = Roofline(model=model, machine=Machine(), slo=parse_slo("tpot_p95<10ms"))
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "speculation": "off"}
    stored = 2.0 * fits.parameters()
    assert fits.refuses(config) is None, "nothing is known of the machine"
    assert fits.most(config) == float("inf")
    small = Roofline(model=model, machine=Machine(memory_bytes=0.9 * stored), slo=fits.slo)
    assert "at least" in (small.refuses(config) or "")
    assert small.refuses({**config, "quantization": "int4"}) is None

    def at(bandwidth: float) -> Roofline:
        return Roofline(model=model, machine=Machine(bandwidth=bandwidth), slo=fits.slo)

    slow = at(fits.weight_bytes(config, reading=True) / 0.018)  # 18 ms to read all weights, of 10 allowed
    assert "TPOT p95 < 10 ms cannot be" in (slow.refuses(config) or "")
    assert slow.refuses({**config, "speculation": {"method": "ngram", "num_speculative_tokens": 4}}) is None
    assert slow.refuses({**config, "quantization": "int8"}) is None
    slow.output_tokens = 100.0
    assert slow.most(config) == pytest.approx(1.5 * 8 / 0.018 / 100)
    with pytest.raises(ConfigError, match="bandwidth must be"):
        Machine(bandwidth=0.0)


def test_what_is_split_among_devices_has_the_memory_and_the_bandwidth_of_all(talking_llama: Path) -> None:
    model, slo = load_model_config(resolve(str(talking_llama))), parse_slo("tpot_p95<10ms")
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "speculation": "off"}
    probe = Roofline(model=model, machine=Machine(), slo=slo)
    weights = probe.weight_bytes(config, reading=True)
    one = Roofline(model=model, slo=slo, machine=Machine(memory_bytes=0.6 * probe.least_bytes(config),
                                                         bandwidth=weights / 0.015, operations=1e12))  # fmt: skip
    assert "at least" in (one.refuses(config) or "")
    two = {**config, "tensor_parallel_size": 2}
    assert one.refuses(two) is None
    one.output_tokens = 100.0
    assert one.most(two) == pytest.approx(2 * one.most(config))


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA H100 80GB HBM3", 3.36e12),
        ("NVIDIA H100 NVL", 3.94e12),
        ("NVIDIA A100-SXM4-80GB", 2.04e12),
        ("NVIDIA A10G", 0.601e12),
        ("NVIDIA L40", 0.864e12),
        ("NVIDIA L4", 0.301e12),
        ("Tesla V100S-PCIE-32GB", 1.14e12),
        ("NVIDIA GeForce RTX 3090 Ti", 1.01e12),
        ("NVIDIA GB200", None),
        ("NVIDIA RTX A1000", None),
        ("something new", None),
    ],
)
def test_gpus_are_known_by_their_whole_names(name: str, bandwidth: float | None) -> None:
    assert Machine.of_gpu(name, 1e11).bandwidth == bandwidth


@pytest.mark.parametrize(
    ("words", "visible", "found"),
    [
        ("", None, ("NVIDIA L4", False, True)),
        ("", "1", ("NVIDIA L4", False, True)),
        ("", "MIG-7a", ("", False, False)),  # a GPU there is, but what of it is ours nobody says
        ("exit 9", None, ("", True, True)),
        ("", "-1", ("", True, True)),
    ],
)
def test_what_gpu_there_is(
    words: str, visible: str | None, found: tuple[str, bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n{words}\ncase "$*" in *MIG*) exit 6;; esac\necho "NVIDIA L4, 23034"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = inspect(on_cpu=False, memory_bytes=10**9)
    assert (machine.name, machine.on_cpu, machine.limits.memory_bytes is not None) == found


@pytest.fixture(scope="module")
def result() -> TuneResult:
    runner = Troubled(
        dies=lambda config: "out of memory" if config["max_num_seqs"] == 128 else None,
        divergence=lambda config: 0.5,
    )
    space = small_space(quantization=(None, "int8"))
    search = Search(trials=10, num_requests=24, tolerance=0.05)
    return asyncio.run(tune(runner, space, goal(price_per_hour=2.0), search=search, default=space.at((3, 2, 1, 0, 0))))


class Page(html.parser.HTMLParser):
    """Which tags are open, and what is fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "line", "circle", "polyline", "rect", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag


def test_the_report_says_why_and_needs_nothing_else(result: TuneResult) -> None:
    document = json.loads(json.dumps(to_json(result, what={"model": "<b>"}, options={})))
    text = to_html(result, document, title="sol tune: <model>", start="sol serve --config <best>")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.links == []
    assert "<script" not in text
    assert "sol tune: &lt;model&gt;" in text
    assert "out of memory" in text
    assert "above 0.02" in text
    assert "cost per million good tokens" in text
    assert "polyline" in text
    for parameter in result.space.parameters:
        assert parameter.name in text
    assert document["best"] == result.best.number if result.best else None
    assert len(document["trials"]) == len(result.trials)
    assert document["gain"] is None, "the default died"
