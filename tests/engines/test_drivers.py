"""Specs as every engine's command line: the real flags, and nothing that was asked for left out."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from sol.cli import build_parser
from sol.cli.serve import server_config
from sol.config import flag_options
from sol.engines.commands import find_program
from sol.engines.drivers import DRIVERS, driver_named
from sol.engines.spec import EngineSpec, engine_spec
from sol.errors import ConfigError
from sol.speculation.config import DRAFTERS

EVERYTHING: dict[str, Any] = {
    "served_model_name": "name",
    "max_model_len": 4096,
    "gpu_memory_utilization": 0.8,
    "quantization": "awq",
    "dtype": "float16",
    "kv_cache_dtype": "auto",
    "enable_prefix_caching": False,
    "block_size": 32,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "ray",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "speculation": {"method": "draft_model", "model": "small", "num_speculative_tokens": 4},
}


def words(name: str, options: dict[str, Any], directory: Path | None = None) -> list[str]:
    spec = engine_spec({"model": "org/model", **options})
    return list(driver_named(name).command(spec, port=9000, directory=directory).argv)


def without(*names: str, **changed: Any) -> dict[str, Any]:
    return {name: value for name, value in EVERYTHING.items() if name not in names} | changed


def test_sol_understands_its_command_line() -> None:
    options = without("distributed_executor_backend", tensor_parallel_size=1, pipeline_parallel_size=1)
    command = words("sol", options)
    args = build_parser().parse_args(command[command.index("serve") :])
    config = server_config(args)
    engine = config.engine
    assert (config.host, config.port, config.served_model_names) == ("127.0.0.1", 9000, ("name",))
    assert engine.model == "org/model"
    assert (engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens) == (4096, 64, 2048)
    assert (engine.gpu_memory_utilization, engine.block_size, engine.enable_prefix_caching) == (0.8, 32, False)
    assert (engine.quantization, engine.dtype, engine.kv_cache_dtype) == ("awq", "float16", "auto")
    speculative = engine.speculative()
    assert (speculative.drafters, speculative.model) == (("draft_model",), "small")
    assert speculative.num_speculative_tokens == 4


@pytest.mark.parametrize("off", [False, "off"])
def test_speculation_is_switched_off(off: object) -> None:
    command = words("sol", {"speculation": off})
    config = server_config(build_parser().parse_args(command[command.index("serve") :]))
    assert config.engine.speculative().drafters == ()
    assert "spec" not in " ".join(words("vllm", {"speculation": off}))


def test_sol_takes_drafters_joined_and_options_of_its_own() -> None:
    speculation = {"method": "suffix+early_exit", "options": {"num_exit_layers": 3}}
    command = words("sol", {"speculation": speculation})
    config = server_config(build_parser().parse_args(command[command.index("serve") :]))
    assert config.engine.speculative().drafters == ("suffix", "early_exit")
    assert config.engine.speculative().num_exit_layers == 3


def test_sol_s_choices_and_drafters_are_its_own() -> None:
    driver = driver_named("sol")
    options = {option.name: option for option in flag_options()}
    assert {name: tuple(values) for name, values in driver.choices.items()} == {
        name: options[name].choices for name in ("quantization", "dtype", "kv_cache_dtype")
    }
    assert set(driver.methods) == set(DRAFTERS)


def test_vllm() -> None:
    assert shlex.join(words("vllm", EVERYTHING)) == (
        "vllm serve org/model --host 127.0.0.1 --port 9000 --served-model-name name --max-model-len 4096 "
        "--gpu-memory-utilization 0.8 --quantization awq --dtype float16 --kv-cache-dtype auto "
        "--no-enable-prefix-caching --block-size 32 --tensor-parallel-size 2 --pipeline-parallel-size 2 "
        "--distributed-executor-backend ray --max-num-seqs 64 --max-num-batched-tokens 2048 --speculative-config "
        """'{"method": "draft_model", "model": "small", "num_speculative_tokens": 4}'"""
    )


def test_sglang() -> None:
    assert shlex.join(words("sglang", without("distributed_executor_backend"))) == (
        "python3 -m sglang.launch_server --model-path org/model --host 127.0.0.1 --port 9000 --enable-metrics "
        "--served-model-name name --context-length 4096 --mem-fraction-static 0.8 --quantization awq --dtype float16 "
        "--kv-cache-dtype auto --disable-radix-cache --page-size 32 --tensor-parallel-size 2 "
        "--pipeline-parallel-size 2 --max-running-requests 64 --chunked-prefill-size 2048 "
        "--speculative-algorithm STANDALONE --speculative-draft-model-path small --speculative-num-steps 4 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 5"
    )
    ngram = words("sglang", {"speculation": {"method": "ngram", "num_speculative_tokens": 7}})
    assert ngram[-4:] == ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"]


def test_tgi() -> None:
    options = without(
        "served_model_name", "distributed_executor_backend", "block_size", "quantization",
        pipeline_parallel_size=1, kv_cache_dtype="fp8_e5m2",
        speculation={"method": "ngram", "num_speculative_tokens": 3},
    )  # fmt: skip
    command = driver_named("tgi").command(engine_spec({"model": "org/model", **options}), port=9000)
    assert shlex.join(command.argv) == (
        "text-generation-launcher --model-id org/model --hostname 127.0.0.1 --port 9000 --max-total-tokens 4096 "
        "--max-input-tokens 4095 --cuda-memory-fraction 0.8 --dtype float16 --kv-cache-dtype fp8_e5m2 --num-shard 2 "
        "--max-batch-size 64 --max-batch-prefill-tokens 2048 --speculate 3"
    )
    assert command.env == {"PREFIX_CACHING": "0"}


def test_tensorrt_llm_puts_what_has_no_flag_into_a_file(tmp_path: Path) -> None:
    options = without("quantization", "distributed_executor_backend", kv_cache_dtype="fp8")
    command = words("tensorrt-llm", options, tmp_path / "files")
    path = tmp_path / "files" / "trtllm-9000.yaml"
    assert shlex.join(command) == (
        "trtllm-serve org/model --host 127.0.0.1 --port 9000 --served_model_name name --max_seq_len 4096 "
        "--kv_cache_free_gpu_memory_fraction 0.8 --tp_size 2 --pp_size 2 --max_batch_size 64 --max_num_tokens 2048 "
        f"--config {path}"
    )
    assert yaml.safe_load(path.read_text()) == {
        "return_perf_metrics": True,
        "enable_iter_perf_stats": True,
        "kv_cache_config": {"enable_block_reuse": False, "tokens_per_block": 32, "dtype": "fp8"},
        "dtype": "float16",
        "speculative_config": {"decoding_type": "DraftTarget", "max_draft_len": 4, "speculative_model": "small"},
    }
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        words("tensorrt-llm", {}, tmp_path / "taken")


def test_llama_cpp() -> None:
    options = without(
        "quantization", "dtype", "gpu_memory_utilization", "block_size", "distributed_executor_backend",
        kv_cache_dtype="q8_0", tensor_parallel_size=1, pipeline_parallel_size=1,
        speculation={"method": "draft_model", "model": "small.gguf", "num_speculative_tokens": 4},
    )  # fmt: skip
    assert shlex.join(words("llama.cpp", {**options, "model": "m.gguf"})) == (
        "llama-server --model m.gguf --host 127.0.0.1 --port 9000 --metrics --alias name --ctx-size 262144 "
        "--cache-type-k q8_0 --cache-type-v q8_0 --no-cache-prompt --parallel 64 --batch-size 2048 "
        "--spec-type draft-simple --spec-draft-model small.gguf --spec-draft-n-max 4"
    )
    assert words("llama.cpp", {"model": "org/name-GGUF:Q4_K_M"})[1:3] == ["--hf-repo", "org/name-GGUF:Q4_K_M"]
    assert words("llama.cpp", {"model": "./org/name"})[1] == "--model"


@pytest.mark.parametrize("name", [name for name in DRIVERS if name != "openai"])
def test_every_option_is_in_the_command_line_or_refused_by_name(name: str, tmp_path: Path) -> None:
    """With one option at a time: either the command differs from the bare one (or the environment, or the file), or
    the error names the option and the engine."""
    driver = driver_named(name)

    def attempt(options: dict[str, Any]) -> tuple[object, ...] | ConfigError:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        try:
            command = driver.command(engine_spec({"model": "m", **options}), port=9000, directory=directory)
        except ConfigError as error:
            return error
        argv = tuple(word for word in command.argv if str(directory) not in word)
        return argv, command.env, *(path.read_text() for path in directory.iterdir())

    bare = attempt({})
    for option, value in EVERYTHING.items():
        result = attempt({option: value})
        if isinstance(result, ConfigError):
            assert option in (result.param or "")
            assert driver.title in result.message
        else:
            assert result != bare, option


@pytest.mark.parametrize("name", [name for name in DRIVERS if name != "openai"])
def test_what_a_driver_writes_is_found_again_in_a_command(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    command = driver_named(name).command(EngineSpec(model="m"), host="0.0.0.0", port=9000, directory=tmp_path)
    found = find_program(command.argv)
    assert found is not None
    assert found[0].engine == name
    assert found[0].ready_path == command.ready_path
    assert (command.url, command.engine) == ("http://localhost:9000", name)


def test_another_program_more_words_and_an_environment() -> None:
    options = {"program": "/opt/my env/bin/vllm serve".replace("my env", "'my env'"), "extra_args": ["--seed", "3"]}
    spec = engine_spec({"model": "m", **options, "env": {"CUDA_VISIBLE_DEVICES": "1"}})
    command = driver_named("vllm").command(spec, port=9000)
    assert command.argv[:3] == ("/opt/my env/bin/vllm", "serve", "m")
    assert command.argv[-2:] == ("--seed", "3")
    assert command.env == {"CUDA_VISIBLE_DEVICES": "1"}


def test_a_whole_command() -> None:
    spec = engine_spec({"command": "A=1 B=1 vllm serve m", "env": {"B": "2"}})
    command = driver_named("vllm").command(spec, port=9000)
    assert command.argv[-4:] == ("--host", "127.0.0.1", "--port", "9000")
    assert command.env == {"A": "1", "B": "2"}
    other = driver_named("sglang").command(engine_spec({"command": "image run {port}"}), port=9000)
    assert (other.argv, other.ready_path, other.engine) == (("image", "run", "9000"), "/health", "sglang")
    assert driver_named("openai").command(engine_spec({"command": "x {port}"}), port=9).ready_path == "/v1/models"


@pytest.mark.parametrize(
    ("name", "options", "param", "message"),
    [
        ("sol", {"tensor_parallel_size": 2}, "tensor_parallel_size", "served by vLLM"),
        ("sol", {"quantization": "exl2"}, "quantization", "must be one of awq"),
        ("sol", {"speculation": {"method": "eagle"}}, "speculation.method", "not 'eagle'"),
        ("sol", {"speculation": {"method": "draft_model"}}, "speculation.model", "is missing"),
        ("vllm", {"speculation": {"method": "draft_model"}}, "speculation.model", "is missing"),
        ("vllm", {"dtype": "int8"}, "dtype", "must be one of"),
        ("sglang", {"speculation": {"method": "eagle3"}}, "speculation.model", "drafts with a model"),
        ("sglang", {"speculation": {"method": "ngram", "model": "x"}}, "speculation.model", "has no use"),
        ("sglang", {"speculation": {"method": "ngram", "options": {"k": 1}}}, "speculation.options.k", "extra_args"),
        ("tgi", {"speculation": {"method": "ngram"}}, "speculation.num_speculative_tokens", "is missing"),
        ("tgi", {"served_model_name": "x"}, "served_model_name", "any name"),
        ("tgi", {"dtype": "float16", "quantization": "awq"}, "dtype", "exclude each other"),
        ("tensorrt-llm", {"speculation": {"method": "mtp"}}, "speculation.num_speculative_tokens", "no default"),
        ("tensorrt-llm", {"quantization": "fp8"}, "quantization", "checkpoint"),
        ("llama.cpp", {"quantization": "q4_0"}, "quantization", "GGUF"),
        ("llama.cpp", {"tensor_parallel_size": 2}, "tensor_parallel_size", "--split-mode"),
        ("openai", {}, "driver", "name its url"),
    ],
)
def test_what_an_engine_does_not_have_is_refused(name: str, options: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        words(name, options)
    assert caught.value.param == param
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "spec: needs a model, or a command"),
        ({"model": "m", "modle": 1}, "spec: modle: there is no such option; there are model,"),
        ({"model": "m", "max_num_seqs": 0}, "spec: max_num_seqs: Input should be greater than or equal to 1, not 0"),
        ({"model": "m", "max_num_seqs": True}, "spec: max_num_seqs: "),
        ({"model": "m", "gpu_memory_utilization": 1.5}, "not 1.5"),
        ({"model": "m", "distributed_executor_backend": "mpi"}, "spec: distributed_executor_backend: "),
        ({"model": "m", "speculation": {"method": "ngram", "tokens": 4}}, "spec: speculation: tokens: there is no"),
        ({"model": "m", "speculation": {"model": "x"}}, "spec: speculation: method: "),
        ({"command": "x {port}", "model": "m", "dtype": "auto"}, "leave out dtype, model, or write them into it"),
    ],
)
def test_specs_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_spec(options)
    assert message in caught.value.message


def test_an_engine_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match="driver must be one of sol, vllm"):
        driver_named("ollama")


def test_speculative_options_are_json_of_the_engine_s_own_keys() -> None:
    speculation = {"method": "ngram", "options": {"prompt_lookup_max": 4}}
    command = words("vllm", {"speculation": speculation})
    assert json.loads(command[-1]) == {"method": "ngram", "prompt_lookup_max": 4}


@pytest.mark.parametrize("name", ["", "A=B", "A\0"])
def test_a_variable_that_no_process_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="env") as refused:
        engine_spec({"model": "m", "env": {name: "x"}})
    assert refused.value.param is not None
    assert refused.value.param.startswith("spec.env")
