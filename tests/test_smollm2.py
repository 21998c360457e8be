"""The default model says what transformers makes of the same weights: 10 prompts, 64 greedy tokens each."""

from __future__ import annotations

import torch

from sol import LLM, SamplingParams
from sol.models.checkpoint import open_checkpoint
from sol.models.config import load_model_config
from sol.models.source import ModelFiles

CONVERSATIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis in two sentences.",
    "def fibonacci(n):",
    "List five uses of a brick.",
    "Translate 'good morning' into Spanish.",
    "What is 17 plus 25?",
    "Tell me a short story about a fox and a crow.",
    "为什么天空是蓝色的?",
    "Summarise: The committee met on Tuesday and postponed its decision on the new library until the spring.",
]
COUNT = 64


def transformers_model(files: ModelFiles) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config, checkpoint = load_model_config(files), open_checkpoint(files)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=True,
        )
    )
    state = {name: checkpoint.load(name, torch.float32) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    return model.eval()


def test_greedy_tokens_are_those_of_transformers(smollm2: ModelFiles) -> None:
    llm = LLM(max_model_len=256)
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    results = llm.chat([[{"role": "user", "content": text}] for text in CONVERSATIONS], params, use_tqdm=False)
    assert "Paris" in results[0].outputs[0].text

    reference = transformers_model(smollm2)
    for result in results:
        made = result.outputs[0].token_ids
        assert len(made) == COUNT
        # One pass over prompt and answer: if each token is the likeliest after those before it, greedy decoding
        # gives exactly these.
        with torch.inference_mode():
            logits = reference(torch.tensor([result.prompt_token_ids + made])).logits[0]
        assert logits[len(result.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == made
