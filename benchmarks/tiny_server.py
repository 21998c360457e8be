"""`sol serve` on a model that is there at once: random weights in two small layers, under the default model's tokenizer
and chat template. It talks nonsense, in all the vocabulary, as fast as a server can be asked."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
from common import ROOT, free_port, server, tail, wait_until_ready

from sol.config import DEFAULT_MODEL
from sol.models.gguf import GGUFFile
from sol.models.source import resolve
from sol.text.gguf_tokenizer import build_gguf_tokenizer

NAME = "tiny"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_model(directory: Path) -> None:
    """What `--load-format dummy` needs of a model: everything but its weights."""
    gguf = resolve(DEFAULT_MODEL, progress=False).gguf
    assert gguf is not None
    metadata = GGUFFile(gguf).metadata
    build_gguf_tokenizer(metadata, gguf.name).backend.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": metadata["tokenizer.chat_template"], "eos_token": "<|im_end|>"})
    )


@dataclass(frozen=True)
class TinyServer:
    port: int
    process: psutil.Process
    log: IO[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def resident_bytes(self) -> int:
        """Of server and engine."""
        return sum(p.memory_info().rss for p in [self.process, *self.process.children(recursive=True)])

    def tracebacks(self) -> list[str]:
        """In the log: nothing that a client does should leave one."""
        return tail(self.log, 10**9).split("Traceback (most recent call last)")[1:]


@contextlib.contextmanager
def tiny_server(*options: str, model: str | None = None) -> Iterator[TinyServer]:
    """Ready, under the name `NAME`; `model` is another to serve, `options` are flags of `sol serve`."""
    with tempfile.TemporaryDirectory() as directory, tempfile.NamedTemporaryFile(suffix=".log") as log:
        named = [model]
        if model is None:
            write_model(Path(directory))
            named = [directory, "--load-format", "dummy"]
        port = free_port()
        command = [sys.executable, "-m", "sol", "serve", *named, "--served-model-name", NAME, "--port", str(port)]
        with server([*command, *options], log, cwd=ROOT, env=dict(os.environ)) as process:
            wait_until_ready(process, port, log, 300)
            yield TinyServer(port, psutil.Process(process.pid), log)
