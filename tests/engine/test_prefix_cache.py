from __future__ import annotations

import pytest
from token_runner import make_request

from sol.engine.block_pool import BlockPool
from sol.engine.prefix_cache import PrefixCache, hash_block
from sol.engine.request import Request
from sol.engine.request import make_request as accept


def request_of(tokens: list[int]) -> Request:
    return accept(make_request("r", tokens), max_model_len=1000, sequence=0)


def computed(pool: BlockPool, cache: PrefixCache, tokens: list[int], count: int | None = None) -> Request:
    """A request that has its blocks, `count` of its tokens computed."""
    request = request_of(tokens)
    request.block_ids = pool.allocate(-(-len(tokens) // 4))
    request.num_computed_tokens = len(tokens) if count is None else count
    cache.publish(request)
    return request


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(32)


@pytest.fixture
def cache(pool: BlockPool) -> PrefixCache:
    return PrefixCache(pool, block_size=4)


def test_hashes_are_128_bits_and_depend_on_everything_before() -> None:
    first = hash_block(b"", [1, 2, 3, 4])
    assert len(first) == 16
    assert first == hash_block(b"", [1, 2, 3, 4])
    assert first != hash_block(b"", [1, 2, 4, 3])
    assert hash_block(first, [5, 6, 7, 8]) != hash_block(b"", [5, 6, 7, 8])


def test_full_blocks_of_an_equal_beginning_are_found(pool: BlockPool, cache: PrefixCache) -> None:
    owner = computed(pool, cache, list(range(10)))
    assert cache.find(request_of(list(range(10)))) == owner.block_ids[:2]
    assert cache.find(request_of([*range(8), 99, 98])) == owner.block_ids[:2]
    assert cache.find(request_of([*range(7), 99, 98, 97])) == owner.block_ids[:1]
    assert cache.find(request_of([99, *range(1, 10)])) == []


def test_the_last_token_is_left_to_compute(pool: BlockPool, cache: PrefixCache) -> None:
    owner = computed(pool, cache, list(range(8)))
    assert cache.find(request_of(list(range(8)))) == owner.block_ids[:1]
    assert cache.find(request_of(list(range(9)))) == owner.block_ids
    assert cache.find(request_of([0])) == []


def test_only_computed_tokens_are_published(pool: BlockPool, cache: PrefixCache) -> None:
    owner = computed(pool, cache, list(range(20)), count=7)
    assert cache.find(request_of(list(range(20)))) == owner.block_ids[:1]
    owner.num_computed_tokens = 16
    cache.publish(owner)
    assert cache.find(request_of(list(range(20)))) == owner.block_ids[:4]
    cache.check_integrity(owner)


def test_a_gap_ends_the_prefix(pool: BlockPool, cache: PrefixCache) -> None:
    owner = computed(pool, cache, list(range(12)))
    pool.release(owner.block_ids)
    pool.acquire(owner.block_ids[:1] + owner.block_ids[2:])
    while pool.find(owner.block_hashes[1]) is not None:
        pool.allocate(1)
    assert cache.find(request_of(list(range(13)))) == owner.block_ids[:1]


def test_generated_tokens_are_hashed_like_a_prompt(pool: BlockPool, cache: PrefixCache) -> None:
    owner = computed(pool, cache, [1, 2, 3])
    owner.block_ids += pool.allocate(1)
    for token in (4, 5):
        owner.append(token)
    owner.num_computed_tokens = 4
    cache.publish(owner)
    assert cache.find(request_of([1, 2, 3, 4, 5])) == owner.block_ids[:1]


def test_check_integrity_finds_what_is_wrong(pool: BlockPool, cache: PrefixCache) -> None:
    owner = computed(pool, cache, list(range(12)), count=8)
    cache.check_integrity(owner)
    owner.num_computed_tokens = 12
    with pytest.raises(AssertionError, match="not published"):
        cache.check_integrity(owner)
    owner.num_computed_tokens = 8
    pool.publish(owner.block_ids[2], b"early")
    with pytest.raises(AssertionError, match="before it is computed"):
        cache.check_integrity(owner)
    other = computed(pool, cache, [9, 9, 9, 9])
    other.token_ids[0] = 8
    with pytest.raises(AssertionError, match="what it does not hold"):
        cache.check_integrity(other)
