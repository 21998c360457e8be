"""Tiny Llama checkpoints with random weights, written by transformers and by the `gguf` package."""

from __future__ import annotations

import functools
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


@dataclass(frozen=True)
class TinyLlama:
    """A checkpoint on disk and the transformers model it was saved from."""

    directory: Path
    model: LlamaForCausalLM

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """By Hugging Face name, without the tied copy of the embedding."""
        state = self.model.state_dict()
        if self.model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        return dict(state)


def make_llama(
    *, dtype: torch.dtype = torch.float32, seed: int = 0, family: str = "Llama", **config: Any
) -> LlamaForCausalLM:
    """A random `LlamaForCausalLM`, or Mistral's or Qwen's, in evaluation mode; keyword arguments are those of
    LlamaConfig and so on, over tiny defaults.

    Norms and biases are random too, so that a test notices when one is forgotten.
    """
    import transformers

    values: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    if family == "Phi3":  # its head_dim follows, and a padding token must lie inside the vocabulary
        values |= {"pad_token_id": 0}
        del values["head_dim"]
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    made_from = getattr(transformers, name)(**(values | config))
    model: LlamaForCausalLM = getattr(transformers, f"{family}ForCausalLM")(made_from).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(std=0.2)
    return model.requires_grad_(False).to(dtype)


def save_llama(directory: Path, *, max_shard_size: str = "1GB", **options: Any) -> TinyLlama:
    """`make_llama(**options)` saved as config.json, generation_config.json and safetensors."""
    model = make_llama(**options)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return TinyLlama(directory, model)


@dataclass
class GGUFOptions:
    """What `write_gguf` does to a model on the way."""

    quantization: dict[str, str] = field(default_factory=dict)
    """GGUF tensor name → type that `gguf.quants.quantize` can make; others stay F32."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Added to what the converter writes, or instead of it; None removes a key."""
    tensors: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Extra F32 tensors."""
    split_experts: bool = False
    """Each expert in tensors of its own, as the first converters of Mixtral wrote them."""
    raw: dict[str, tuple[npt.NDArray[np.uint8], str]] = field(default_factory=dict)
    """Tensors replaced by the raw blocks (uint8 [rows, bytes of a row]) of a type."""


_FLOAT16_FIELDS = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
"""Where float16 scales and minima lie in a block."""


def random_blocks(
    kind: str, rows: int, columns: int, seed: int, *, scale: float | None = None
) -> npt.NDArray[np.uint8]:
    """Blocks of a ggml type with random bits in every field, [rows, bytes of a row].

    float16 fields are finite: among them the largest, subnormals and -0; or, with `scale`, of about that size, which
    makes weights that a model can be computed with.
    """
    from sol.ops.dequantize import GGML_BLOCKS

    block, nbytes = GGML_BLOCKS[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, size=(rows * columns // block, nbytes), dtype=np.uint8)
    special = np.array([0.0, -0.0, 6e-8, -6e-5, 1.0, 65504.0, -65504.0], dtype=np.float16)
    for offset in _FLOAT16_FIELDS.get(kind, []):
        if scale is None:
            values = generator.integers(0, 0x7C00, size=len(blocks)).astype(np.uint16)
            values |= generator.integers(0, 2, size=len(blocks)).astype(np.uint16) << 15
            values[: len(special)] = special.view(np.uint16)[: len(values)]
        else:
            values = (scale * generator.uniform(0.5, 1.5, size=len(blocks))).astype(np.float16).view(np.uint16)
        blocks[:, offset : offset + 2] = values[:, None].view(np.uint8)
    if kind in ("F32", "F16", "BF16"):
        floats = generator.normal(size=(len(blocks), 1)) * np.exp2(generator.integers(-20, 15, size=(len(blocks), 1)))
        if kind == "BF16":
            blocks = (floats.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            blocks = floats.astype(np.float32 if kind == "F32" else np.float16).view(np.uint8)
    return blocks.reshape(rows, columns // block * nbytes)


@functools.cache
def _tensor_names(arch: str) -> Any:
    import gguf

    return gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], 64)


def gguf_name(name: str, arch: str = "llama") -> str:
    """A parameter's name in a GGUF file, from the `gguf` package's own table."""
    stem, suffix = name.rsplit(".", 1)
    found: str | None = _tensor_names(arch).get_name(stem)
    assert found is not None, name
    return f"{found}.{suffix}"


def permute(weight: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """The row order that converters give q and k: the halves of each head interleaved."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


_EXPERTS = ".experts."


def _with_experts_stacked(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """The parameters by the names of published checkpoints, each projection of all experts as one, without a number."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        saved = load_file(Path(directory) / "model.safetensors")
    state: dict[str, torch.Tensor] = {}
    for name, parameter in saved.items():
        before, found, after = name.partition(_EXPERTS)
        if not found:
            state[name] = parameter
        elif after.startswith("0."):
            count = model.config.num_local_experts
            parts = [saved[f"{before}{_EXPERTS}{index}.{after[2:]}"] for index in range(count)]
            state[f"{before}{_EXPERTS}{after[2:]}"] = torch.stack(parts)
    return state


def _family_metadata(config: Any, arch: str) -> dict[str, Any]:
    """What llama.cpp's converters write for this family, by the `gguf` package's keys."""
    from gguf import Keys

    written: dict[str, Any] = {}
    rope = config.rope_parameters
    if arch == "gemma3":
        written[Keys.Rope.FREQ_BASE_SWA] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    written[Keys.Rope.FREQ_BASE] = float(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        written[Keys.Rope.SCALING_TYPE] = "linear"
        written[Keys.Rope.SCALING_FACTOR] = float(rope["factor"])
    if arch in ("gemma2", "gemma3"):
        written[Keys.Attention.SLIDING_WINDOW] = config.sliding_window
        for key, value in (
            (Keys.LLM.ATTN_LOGIT_SOFTCAPPING, config.attn_logit_softcapping if arch == "gemma2" else None),
            (Keys.LLM.FINAL_LOGIT_SOFTCAPPING, config.final_logit_softcapping),
        ):
            if value is not None:
                written[key] = float(value)
    if arch == "gemma3":
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        written[Keys.Attention.SLIDING_WINDOW_PATTERN] = pattern
    if arch in ("llama", "qwen3moe") and hasattr(config, "num_local_experts"):
        written[Keys.LLM.EXPERT_COUNT] = config.num_local_experts
        written[Keys.LLM.EXPERT_USED_COUNT] = config.num_experts_per_tok
    if arch == "qwen3moe":
        written[Keys.LLM.EXPERT_FEED_FORWARD_LENGTH] = config.moe_intermediate_size
    if arch == "phi3":
        written[Keys.Rope.DIMENSION_COUNT] = int(config.hidden_size // config.num_attention_heads
                                                 * rope["partial_rotary_factor"])  # fmt: skip
        if rope["rope_type"] == "longrope":
            ratio = config.max_position_embeddings / config.original_max_position_embeddings
            factor = math.sqrt(1 + math.log(ratio) / math.log(config.original_max_position_embeddings))
            written[Keys.Rope.SCALING_ATTN_FACTOR] = factor
        written[Keys.Rope.SCALING_ORIG_CTX_LEN] = config.original_max_position_embeddings
        written[Keys.Attention.SLIDING_WINDOW] = config.sliding_window or 0
    return {key.format(arch=arch): value for key, value in written.items()}


def write_gguf(path: Path, model: LlamaForCausalLM, options: GGUFOptions | None = None) -> dict[str, torch.Tensor]:
    """Writes the model as llama.cpp's converter does. Returns what a reader must find, float32 by Hugging Face name."""
    import gguf

    options = options or GGUFOptions()
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    names = {"mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
    arch: str = names.get(config.model_type, config.model_type)
    metadata: dict[str, Any] = {
        "llama.vocab_size": config.vocab_size,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.dimension_count": head_dim,
        "tokenizer.ggml.tokens": [f"token{index}" for index in range(config.vocab_size)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata = {key.replace("llama.", f"{arch}.", 1): value for key, value in metadata.items()}
    metadata |= _family_metadata(config, arch) | options.metadata
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", arch))
    for key, value in metadata.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    expected: dict[str, torch.Tensor] = {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if arch == "llama" else {}
    state = dict(model.state_dict())
    if hasattr(config, "num_local_experts"):
        state = _with_experts_stacked(model)
    for name, parameter in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = gguf_name(name, arch)
        num_heads = next((count for module, count in heads.items() if f".{module}." in name), None)
        # Gemma's norms are stored as what they multiply by.
        offset = 1.0 if arch.startswith("gemma") and name.endswith("norm.weight") else 0.0
        weight = parameter.float().numpy() + np.float32(offset)
        kind = options.quantization.get(theirs, "F32")
        if theirs in options.raw:
            stored, kind = options.raw[theirs]
        elif kind == "F32":
            stored = weight if num_heads is None else permute(weight, num_heads)
        else:
            ordered = weight if num_heads is None else permute(weight, num_heads)
            stored = gguf.quants.quantize(ordered, gguf.GGMLQuantizationType[kind])
        ggml_type = gguf.GGMLQuantizationType[kind]
        if options.split_experts and "_exps." in theirs:
            for index, part in enumerate(stored):
                writer.add_tensor(theirs.replace("_exps.", f".{index}."), part, raw_dtype=ggml_type)
        else:
            writer.add_tensor(theirs, stored, raw_dtype=ggml_type)
        found = gguf.quants.dequantize(stored, ggml_type).reshape(weight.shape)
        if num_heads is not None:  # the permutation of the other factorisation is its inverse
            rows = found.shape[0] // num_heads
            found = found.reshape(num_heads, rows // 2, 2, *found.shape[1:]).swapaxes(1, 2).reshape(found.shape)
        read = torch.from_numpy(np.array(found, dtype=np.float32) - np.float32(offset))
        if _EXPERTS in name:
            expected |= {name.replace(_EXPERTS, f"{_EXPERTS}{index}."): part for index, part in enumerate(read)}
        else:
            expected[name] = read
    for name, values in options.tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
