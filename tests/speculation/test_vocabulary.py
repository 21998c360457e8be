"""Drafting across vocabularies: which tokens are the same, what is masked, and how the drafter reads the rest."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from drafting_requests import GREEDY, SAMPLED, draft_model, make_row, one, oracle, program, prompt
from tiny_models import save_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sol.assemble import plan
from sol.config import EngineConfig
from sol.errors import ConfigError
from sol.ops import Program
from sol.sampling.drafting import draft_independent
from sol.speculation.propose.vocabulary import TokenTable, VocabularyMap, match_vocabularies


def table(words: str, special: str = "", **roles: int) -> TokenTable:
    """Ids in order; `_` is an id that stands for nothing."""
    plain = {i: word.encode() for i, word in enumerate(words.split()) if word != "_"}
    first = len(words.split())
    return TokenTable(plain, {first + i: name for i, name in enumerate(special.split())}, roles)


def match(target: TokenTable | None, draft: TokenTable | None, target_size: int, draft_size: int) -> VocabularyMap:
    return match_vocabularies(target, draft, target_size=target_size, draft_size=draft_size)


def test_equal_vocabularies_keep_their_ids_whatever_the_padding() -> None:
    tokens = table("a b c d", "<s>")
    found = match(tokens, tokens, 5, 5)
    logits = torch.randn(2, 5)
    assert found.to_target(logits) is logits, "no copy where nothing has to be done"
    # Padded embeddings: the surplus is never drafted, on either side, and what both have can be read.
    wide = match(tokens, tokens, 6, 8)
    carried = wide.to_target(torch.arange(8.0).repeat(1, 1))
    assert carried.tolist() == [[0, 1, 2, 3, 4, -torch.inf]]
    assert wide.read(np.array([0, 4, 5])).tolist() == [0, 4, 5]
    narrow = match(tokens, tokens, 8, 6)
    assert narrow.to_target(torch.zeros(1, 6)).isfinite().tolist() == [[True] * 5 + [False] * 3]
    assert narrow.read(np.array([5, 6, 7])).tolist() == [5, -1, -1]


def test_differing_vocabularies_share_what_is_spelled_the_same() -> None:
    target = table("a b c ing cing ab", "<s> </s> <|im_end|>", bos=6, eos=7)
    draft = table("ing c _ b a zz", "<|im_end|> <begin> <end>", bos=7, eos=8)
    found = match(target, draft, 9, 10)
    assert found.num_shared == 7
    carried = found.to_target(torch.arange(10.0).unsqueeze(0))[0]
    assert carried.tolist() == [4, 3, 1, 0, -torch.inf, -torch.inf, 7, 8, 6]
    # `cing` is read as its longest ending that the drafter has, `ab` too.
    assert found.read(np.arange(9)).tolist() == [4, 3, 1, 0, 0, 3, 7, 8, 6]


def test_a_token_that_cannot_be_read_stays_unread() -> None:
    target, draft = table("a b c \u00e9"), table("b a c")
    assert match(target, draft, 4, 3).read(np.arange(4)).tolist() == [1, 0, 2, -1]


def test_tokens_of_equal_bytes_are_paired_once() -> None:
    target, draft = table("a a b c"), table("c b a a")
    found = match(target, draft, 4, 4)
    carried = found.to_target(torch.arange(4.0).unsqueeze(0))[0].tolist()
    assert carried == [2, -torch.inf, 1, 0]


def test_too_little_in_common_is_said_with_numbers() -> None:
    with pytest.raises(ConfigError, match="shares 1 of the target's 4 tokens, 25%") as caught:
        match(table("a b c d"), table("a x y z"), 4, 4)
    assert caught.value.param == "speculative_model"


@pytest.mark.parametrize("missing", ["target", "draft", "both"])
def test_without_tokenizers_ids_are_the_same_if_the_sizes_are(missing: str) -> None:
    target = None if missing in ("target", "both") else table("a b c")
    draft = None if missing in ("draft", "both") else table("a b c")
    assert match(target, draft, 4, 4).num_shared == (4 if missing == "both" else 3)
    with pytest.raises(ConfigError, match="the draft model has 5 tokens, the target 4, and there"):
        match(target, draft, 4, 5)


@pytest.fixture(scope="module")
def drafting() -> Program:
    return program(layers=1, hidden=32, intermediate=32)


@pytest.fixture(scope="module")
def permuted() -> VocabularyMap:
    """The target's id i is the drafter's 95 - i; the target has 8 more, and the first 6 of the drafter's it has not."""
    words = [f"w{i}" for i in range(96)]
    draft = TokenTable({95 - i: words[i].encode() for i in range(96)}, {}, {})
    target = TokenTable({i: words[i].encode() for i in range(90)} | {90 + i: b"#" for i in range(8)}, {}, {})
    return match(target, draft, 98, 96)


def test_drafts_come_in_the_targets_ids(drafting: Program, permuted: VocabularyMap) -> None:
    """The same model under other names drafts the same tokens, as long as none is masked."""
    context = [i for i in prompt(12) if i < 90]
    row = make_row("a", context, blocks=range(8), max_tokens=5)
    own = make_row("a", [95 - i for i in context], blocks=range(8), max_tokens=5)
    own.sampling.params = dataclasses.replace(GREEDY, logit_bias=dict.fromkeys(range(6), -100.0))
    with draft_model(drafting, vocabulary=permuted) as drafter:
        assert one(drafter, row).token_ids == [95 - i for i in oracle(drafting, own)]


def test_the_distribution_is_renormalised_over_what_is_shared(drafting: Program, permuted: VocabularyMap) -> None:
    row = make_row("a", [3, 4, 5], blocks=range(8), params=dataclasses.replace(SAMPLED, top_p=1.0), max_tokens=3)
    with draft_model(drafting, vocabulary=permuted, sample_method="independent") as drafter:
        found = one(drafter, row)
        assert found.probs is not None
        assert found.probs.shape == (3, 98)
        torch.testing.assert_close(found.probs.sum(1), torch.ones(3))
        assert (found.probs[:, 90:] == 0).all()
        assert all(token < 90 for token in found.token_ids)
    logits = torch.full((98,), -torch.inf)
    logits[:90] = 0.0
    _, law = draft_independent(logits, row.sampling, [])
    assert law is not None
    torch.testing.assert_close(law[:90], torch.full((90,), 1 / 90))


def test_a_request_with_an_unreadable_token_is_not_drafted_for(drafting: Program, permuted: VocabularyMap) -> None:
    with draft_model(drafting, vocabulary=permuted) as drafter:
        rows = [make_row("a", [3, 92, 4], blocks=range(8)), make_row("b", [3, 4], blocks=range(8, 16))]
        assert [len(p.token_ids) for p in drafter.propose(rows)] == [0, 4]


def write_tokenizer(directory: Path, words: list[str]) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def test_checkpoints_are_matched_by_their_tokenizers(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(60)]
    for name, size, tokens in [
        ("target", 64, [*words, "<end>", "<unk>"]),
        ("turned", 70, ["<unk>", "<end>", *reversed(words), "more"]),
        ("other", 64, [*(f"x{i}" for i in range(60)), "<end>", "<unk>"]),
    ]:
        save_llama(tmp_path / name, vocab_size=size, num_hidden_layers=1)
        write_tokenizer(tmp_path / name, tokens)

    def vocabulary(draft: str) -> VocabularyMap:
        config = {"method": "draft_model", "model": str(tmp_path / draft)}
        options = EngineConfig(model=str(tmp_path / "target"), speculative_config=config, max_model_len=64)
        draft_model = plan(options, progress=False).drafters.draft_model
        assert draft_model is not None
        return draft_model.vocabulary

    assert vocabulary("target").num_shared == 62
    turned = vocabulary("turned")
    assert turned.num_shared == 62
    assert turned.read(np.array([0, 59, 60, 61, 62])).tolist() == [61, 2, 1, 0, -1]
    with pytest.raises(ConfigError, match="shares 2 of the target's 62 tokens"):
        vocabulary("other")
