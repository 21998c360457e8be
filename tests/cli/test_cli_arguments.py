"""The flags: derived from EngineConfig, checked before anything is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from sol.cli import build_parser, main
from sol.cli.arguments import chosen_model, engine_config, sampling_params, whole_number
from sol.cli.serve import server_config
from sol.config import DEFAULT_MODEL, EngineConfig, flag_options
from sol.errors import ConfigError, RequestError


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(words)


def test_every_engine_option_but_skip_tokenizer_init_is_a_flag() -> None:
    args = parse("chat")
    missing = {option.name for option in flag_options() if not hasattr(args, option.name)}
    assert missing == {"skip_tokenizer_init"}


def test_without_flags_the_configuration_is_the_default_one() -> None:
    for command in (["serve"], ["chat"], ["generate", "text"], ["doctor"]):
        assert engine_config(parse(*command)) == EngineConfig()


def test_flags_reach_the_configuration() -> None:
    args = parse(
        "serve", "org/name", "--load-format", "dummy", "--dtype", "bfloat16", "--device", "cpu",
        "--max-model-len", "4K", "--max-num-seqs", "7", "--max-num-batched-tokens", "1k",
        "--max-num-prefill-tokens", "99", "--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", "1.5G",
        "--block-size", "32", "--cpu-kernels", "portable", "--kv-cache-dtype", "int8", "--quantization", "int4",
        "--no-enable-prefix-caching", "--seed", "-3", "--speculative-model", "org/small",
        "--num-speculative-tokens", "5", "--speculative-config", '{"method": "ngram+draft_model"}',
        "--scheduling-policy", "priority", "--priority-aging-seconds", "2.5",
            "--revision", "v1", "--hf-token", "hf_a", "--offline",
    )  # fmt: skip
    expected = EngineConfig(
        model="org/name", load_format="dummy", dtype="bfloat16", device="cpu", max_model_len=4096, max_num_seqs=7,
        max_num_batched_tokens=1000, max_num_prefill_tokens=99, gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=3 * 2**29, block_size=32, cpu_kernels="portable", kv_cache_dtype="int8",
        quantization="int4", enable_prefix_caching=False, seed=-3,
        speculative_model="org/small", num_speculative_tokens=5, speculative_config={"method": "ngram+draft_model"},
        scheduling_policy="priority", priority_aging_seconds=2.5, revision="v1", hf_token="hf_a", offline=True,
    )  # fmt: skip
    assert engine_config(args) == expected
    plain = EngineConfig()
    untested = {f.name for f in dataclasses.fields(plain) if getattr(plain, f.name) == getattr(expected, f.name)}
    assert untested == {"skip_tokenizer_init", "speculation"}
    assert engine_config(parse("serve", "--speculation", "off")) == EngineConfig(speculation="off")


@pytest.mark.parametrize("text", ["{method: ngram}", "ngram", "", '["ngram"]', "null"])
def test_what_is_no_json_object(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("serve", "--speculative-config", text)
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"--speculative-config: {text!r} is no" in said
    assert said.endswith("""; write an object in quotes, like '{"method": "ngram"}'""")


def test_the_model_may_be_positional_or_a_flag_but_not_two_models() -> None:
    assert chosen_model(parse("serve")) == DEFAULT_MODEL
    assert chosen_model(parse("serve", "a/b")) == "a/b"
    assert chosen_model(parse("serve", "--model", "a/b")) == "a/b"
    assert chosen_model(parse("serve", "a/b", "--model", "a/b")) == "a/b"
    with pytest.raises(ConfigError, match=r"'a/b'.*'c/d'"):
        chosen_model(parse("serve", "a/b", "--model", "c/d"))
    assert chosen_model(parse("generate", "a prompt", "--model", "a/b")) == "a/b"


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("-1", -1), ("8k", 8000), ("8K", 8192), ("2M", 2**21), ("1.5k", 1500), ("1g", 10**9)],
)
def test_whole_numbers(text: str, value: int) -> None:
    assert whole_number(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.0001k", "8kk", "infk", "nan", "1/0k", "0x10", "twelve"])
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a whole number"):
        whole_number(text)


def test_server_flags() -> None:
    config = server_config(
        parse(
            "serve",
            "--host",
            "0.0.0.0",
            "--port",
            "0",
            "--served-model-name",
            "a",
            "b",
            "--api-key",
            "k1",
            "--api-key",
            "k2",
        )
    )
    assert (config.host, config.port) == ("0.0.0.0", 0)
    assert config.served_model_names == ("a", "b")
    assert config.api_keys == ("k1", "k2")
    assert server_config(parse("serve")).host == "127.0.0.1", "the network is opened only on request"


def test_a_file_has_the_same_options_and_flags_stand_above_it(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: org/name\nmax-num-seqs: 7\nmax_num_batched_tokens: 1k\nenable_prefix_caching: false\nspeculation: off\n"
        "gpu_memory_utilization: 1e-1\nport: 9000\nserved_model_name: [a, b]\napi_key: k1\nquantization: null\n"
    )
    expected = EngineConfig(
        model="org/name", max_num_seqs=7, max_num_batched_tokens=1000, enable_prefix_caching=False, speculation="off",
        gpu_memory_utilization=0.1,
    )  # fmt: skip
    config = server_config(parse("serve", "--config", str(file)))
    assert config.engine == expected
    assert (config.host, config.port, config.served_model_names) == ("127.0.0.1", 9000, ("a", "b"))
    assert config.api_keys == ("k1",)
    words = ["--config", str(file), "c/d", "--port", "1", "--enable-prefix-caching", "--speculation", "auto"]
    above = server_config(parse("serve", *words, "--max-num-seqs", "9", "--api-key", "k2"))
    assert above.engine == dataclasses.replace(
        expected, model="c/d", enable_prefix_caching=True, max_num_seqs=9, speculation="auto"
    )
    assert (above.port, above.api_keys) == (1, ("k2",))


def test_a_file_of_json_and_an_empty_one(tmp_path: Path) -> None:
    options = {"model": "org/name", "speculative_config": {"method": "ngram"}, "seed": 3}
    file = tmp_path / "serve.json"
    file.write_text(json.dumps(options))
    assert server_config(parse("serve", "--config", str(file))).engine == EngineConfig(**options)
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing yet\n")
    assert server_config(parse("serve", "--config", str(empty))) == server_config(parse("serve"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_seqs: 3", "has an option 'max_seqs' that sol serve does not have"),
        ("skip_tokenizer_init: true", "has an option 'skip_tokenizer_init' that sol serve does not have"),
        ("max_num_seqs: many", "max_num_seqs: 'many' is not a whole number"),
        ("max_num_seqs: 1.5", "max_num_seqs must be a whole number, not 1.5"),
        ("max_num_seqs: true", "max_num_seqs must be a whole number, not True"),
        ("enable_prefix_caching: sometimes", "enable_prefix_caching must be true or false, not 'sometimes'"),
        ("quantization: [int8]", "quantization must be one of awq"),
        ("speculation: true", "speculation must be one of auto, off, not True"),
        ("speculative_config: ngram", "speculative_config must be a mapping, not 'ngram'"),
        ("model: 7", "model must be a string, not 7"),
        ("port: '80'", "port must be a whole number, not '80'"),
        ("served_model_name: [1]", "served_model_name must be a string or a list of strings, not [1]"),
        ("api_key: {secret: 1}", "api_key must be a string or a list of strings, not what was given"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "has max_num_seqs twice"),
        ("- port", "must hold options and their values"),
        ("port: [", "is not YAML"),
    ],
)
def test_what_a_file_cannot_say(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert main(["serve", "--config", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_sampling_flags() -> None:
    params = sampling_params(
        parse(
            "generate", "x", "--max-tokens", "5", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "3",
            "--min-p", "0.1", "--presence-penalty", "1", "--frequency-penalty", "-1", "--repetition-penalty", "1.1",
            "--min-tokens", "2", "--ignore-eos", "--stop", "a", "--stop", "b",
        )
    )  # fmt: skip
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (5, 0.5, 0.9, 3, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.0, -1.0, 1.1)
    assert (params.min_tokens, params.ignore_eos, params.stop) == (2, True, ["a", "b"])
    assert sampling_params(parse("chat")).max_tokens is None
    with pytest.raises(RequestError, match="temperature"):
        sampling_params(parse("chat", "--temperature", "-1"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--block-size", "1000"], "block_size must be 1 to 256 tokens, not 1000"),
        (["serve", "--port", "70000"], "port must be 0 (any free one) to 65535, not 70000"),
        (["serve", "a", "--model", "b"], "model was given twice"),
        (["serve", "--speculative-config", '{"method": "oracle"}'], "speculative_config.method must be ngram, suffix"),
        (["serve", "--speculative-config", '{"methd": "ngram"}'], "speculative_config has no key 'methd'"),
        (["chat", "--speculation", "off", "--speculative-model", "a/b"], "speculation is off, but speculative_model"),
        (["generate", "x", "--top-p", "2"], "top_p must be"),
        (["generate", "-", "-"], "only once"),
        (["generate", ""], "PROMPT must not be empty"),
        (["chat", "--gpu-memory-utilization", "2"], "gpu_memory_utilization must be"),
        (["pull", "/nowhere/at/all"], "there is no such file or directory"),
    ],
)
def test_what_cannot_work_is_one_clear_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sol: error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_an_unknown_flag_is_refused_and_none_is_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["serve", "--tensor-parallel-size", "2"],
        ["serve", "--max-model", "9"],
        ["serve", "--block-size", "x"],
    ):
        with pytest.raises(SystemExit) as exit_:
            main(words)
        assert exit_.value.code == 2
    assert "'x' is not a whole number" in capsys.readouterr().err


def test_how_a_server_lives_and_who_may_call_it(tmp_path: Path) -> None:
    config = server_config(
        parse(
            "serve",
            "--allowed-origins",
            "https://a",
            "https://b",
            "--allowed-methods",
            '["GET", "POST"]',
            "--allowed-headers",
            "authorization",
            "--allow-credentials",
            "--max-queue-len",
            "1k",
            "--drain-timeout",
            "1.5",
            "--restart-engine",
            "3",
        )
    )
    assert config.allowed_origins == ("https://a", "https://b")
    assert config.allowed_methods == ("GET", "POST")
    assert config.allowed_headers == ("authorization",)
    assert config.allow_credentials
    assert (config.max_queue_len, config.drain_timeout, config.restart_engine) == (1000, 1.5, 3)
    file = tmp_path / "serve.yaml"
    file.write_text("allowed_origins: ['*']\ndrain_timeout: 0\nallow_credentials: false\n")
    config = server_config(parse("serve", "--config", str(file)))
    assert (config.allowed_origins, config.drain_timeout) == (("*",), 0)
    cases = {
        "drain_timeout": "drain_timeout: long",
        "allow_credentials": "allow_credentials: 1",
        "restart_engine": "restart_engine: true",
        "allowed_origins": "allowed_origins: ['[1']",
    }
    for param, text in cases.items():
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            server_config(parse("serve", "--config", str(file)))
        assert error.value.param == param
