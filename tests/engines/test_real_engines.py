"""Drivers against the engines themselves, where `make rivals` has put them: vLLM for CPUs and llama.cpp's server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_drivers import EVERYTHING
from tiny_models import save_llama

from sol.engines.drivers import driver_named
from sol.engines.service import Service
from sol.engines.signals import Signals
from sol.engines.spec import engine_spec
from sol.models.gguf import GGUFFile
from sol.models.source import ModelFiles
from sol.text.gguf_tokenizer import build_gguf_tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def rivals() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import rivals
    finally:
        sys.path.remove(str(BENCHMARKS))
    return rivals


@pytest.fixture(scope="module")
def vllm(rivals: Any) -> dict[str, Any]:
    """`program` and `env` of a spec."""
    vllm = rivals.VllmCpu()
    if not vllm.is_there:
        pytest.skip("no vLLM: make rivals")
    env = {name: value for name, value in vllm.environment(1).items() if os.environ.get(name) != value}
    # The wheel for CPUs has another name than the command looks for; the module is the same server.
    return {"program": f"{vllm.python} -m vllm.entrypoints.openai.api_server --model", "env": env}


@pytest.fixture(scope="module")
def llama_server(rivals: Any) -> Path:
    llama = rivals.LlamaCpp()
    program: Path = llama.program("llama-server")
    if not (llama.is_there and program.exists()):
        pytest.skip("no llama-server for this processor: make rivals")
    return program


async def signals_of_a_served_request(service: Service, driver: str, model: str) -> Signals:
    """Serve one completion of 8 tokens while `service` runs."""
    async with service, httpx.AsyncClient(base_url=service.url, timeout=120) as client:
        body = {"model": model, "prompt": "to be or not to be or not to be or not", "max_tokens": 8, "temperature": 0}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 8
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == [model]
        path = driver_named(driver).metrics_path
        assert path is not None
        while True:  # counted some moments after the answer
            signals = driver_named(driver).signals((await client.get(path)).text, time.monotonic())
            if signals.progress or not service.running:
                return signals
            await asyncio.sleep(0.1)


def test_vllm_s_own_parser_understands_every_option(vllm: dict[str, Any]) -> None:
    spec = engine_spec({**EVERYTHING, "model": "org/model", "env": vllm["env"]})
    command = driver_named("vllm").command(spec, port=9000)
    assert command.argv[:2] == ("vllm", "serve")
    program = (
        "import json, sys\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])\n"
        "print(json.dumps({name: getattr(args, name) for name in json.load(sys.stdin)}))\n"
    )
    names = ["host", "port", "model_tag", "speculative_config", *(set(EVERYTHING) - {"speculation"})]
    done = subprocess.run(
        [vllm["program"].split()[0], "-c", program, *command.argv[2:]],
        input=json.dumps(names), env={**os.environ, **command.env}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout.splitlines()[-1])
    expected = {name: value for name, value in EVERYTHING.items() if name != "speculation"}
    assert parsed == {
        **expected, "served_model_name": ["name"], "host": "127.0.0.1", "port": 9000, "model_tag": "org/model",
        "speculative_config": EVERYTHING["speculation"],
    }  # fmt: skip


async def test_vllm_serves(vllm: dict[str, Any], smollm2: ModelFiles, tmp_path: Path) -> None:
    assert smollm2.gguf is not None
    metadata = GGUFFile(smollm2.gguf).metadata
    save_llama(tmp_path, vocab_size=49152, eos_token_id=2, hidden_size=128, head_dim=32)
    build_gguf_tokenizer(metadata, smollm2.gguf.name).backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    options = {
        "model": str(tmp_path), "served_model_name": "tiny", "max_model_len": 256, "dtype": "float32",
        "enable_prefix_caching": True, "block_size": 32, "max_num_seqs": 4, "max_num_batched_tokens": 256,
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "extra_args": ["--enforce-eager"],
        "speculation": {"method": "ngram", "num_speculative_tokens": 2, "options": {"prompt_lookup_max": 3}},
    }  # fmt: skip
    command = driver_named("vllm").command(engine_spec({**options, **vllm}))
    signals = await signals_of_a_served_request(command.service(start_timeout=800), "vllm", "tiny")
    assert (signals.running, signals.waiting, signals.generated_tokens) == (0, 0, 8)
    assert signals.kv_usage is not None
    assert signals.prefix_queries
    assert signals.draft_tokens is not None


async def test_llama_cpp_serves(llama_server: Path, smollm2: ModelFiles) -> None:
    options = {
        "model": str(smollm2.gguf), "served_model_name": "small", "max_model_len": 256, "max_num_seqs": 2,
        "max_num_batched_tokens": 128, "kv_cache_dtype": "f16", "enable_prefix_caching": True,
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "program": str(llama_server),
        "speculation": {"method": "ngram", "num_speculative_tokens": 4}, "extra_args": ["--threads", "1"],
    }  # fmt: skip
    command = driver_named("llama.cpp").command(engine_spec(options))
    signals = await signals_of_a_served_request(command.service(start_timeout=300), "llama.cpp", "small")
    assert (signals.running, signals.waiting) == (0, 0)
    assert signals.progress


@pytest.mark.parametrize(
    "options",
    [
        {"speculation": {"method": "draft_model", "model": "x.gguf", "num_speculative_tokens": 4}},
        {"speculation": {"method": "eagle3", "model": "org/x-GGUF:Q8_0", "num_speculative_tokens": 4}},
        {"speculation": {"method": "mtp"}},
        {"enable_prefix_caching": False},
        {"model": "org/model-GGUF:Q4_K_M"},
    ],
)
def test_llama_cpp_s_own_parser_understands_its_flags(llama_server: Path, options: dict[str, Any]) -> None:
    """With --help at the end, llama-server reads all flags before it, and says which it does not know."""
    spec = engine_spec({"model": "m.gguf", **options, "program": str(llama_server)})
    command = [*driver_named("llama.cpp").command(spec, port=9000).argv, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    broken = subprocess.run([str(llama_server), "--no-such-flag"], capture_output=True, text=True, check=False)
    assert broken.returncode != 0
