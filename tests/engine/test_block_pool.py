from __future__ import annotations

import pytest

from sol.engine.block_pool import BlockPool


def test_blocks_are_handed_out_once_and_come_back() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (pool.num_free, pool.usage) == (0, 1.0)
    with pytest.raises(RuntimeError, match="1 blocks asked for, 0 of 4 are free"):
        pool.allocate(1)
    pool.check_integrity([first, second])
    pool.release(second)
    assert pool.allocate(1) == second
    pool.release(first)
    pool.release(second)
    assert (pool.num_free, pool.usage) == (4, 0.0)
    pool.check_integrity([])


def test_allocating_nothing_takes_nothing() -> None:
    pool = BlockPool(2)
    assert pool.allocate(0) == []
    assert pool.num_free == 2


def test_a_shared_block_is_free_when_its_last_holder_leaves() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.acquire(table)
    assert pool.ref_count(table[0]) == 2
    pool.release(table)
    assert pool.num_free == 1
    pool.check_integrity([table])
    pool.release(table)
    assert pool.num_free == 2
    with pytest.raises(RuntimeError, match="nobody holds it"):
        pool.release(table)


def test_content_can_be_found_until_the_block_is_reused() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, b"x")
    pool.release([block])
    assert pool.find(b"x") == block
    pool.allocate(1)  # the block that holds nothing goes first
    assert pool.find(b"x") == block
    assert pool.allocate(1) == [block]
    assert pool.find(b"x") is None
    assert pool.block_hash(block) is None


def test_the_tail_of_a_prompt_is_evicted_first() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    for block, name in zip(table, (b"head", b"middle", b"tail"), strict=True):
        pool.publish(block, name)
    pool.release(table)
    for name in (b"tail", b"middle", b"head"):
        assert pool.find(name) is not None
        pool.allocate(1)
        assert pool.find(name) is None


def test_the_longest_unused_is_evicted_first_and_a_hit_is_a_use() -> None:
    pool = BlockPool(3)
    tables = [pool.allocate(1) for _ in range(3)]
    for table, name in zip(tables, (b"a", b"b", b"c"), strict=True):
        pool.publish(table[0], name)
        pool.release(table)
    pool.acquire(tables[0])
    pool.check_integrity([tables[0]])
    pool.release(tables[0])
    assert pool.allocate(3) == [tables[1][0], tables[2][0], tables[0][0]]


def test_a_block_that_nobody_can_find_is_reused_before_any_that_holds_something() -> None:
    pool = BlockPool(2)
    known, unknown = pool.allocate(1), pool.allocate(1)
    pool.publish(known[0], b"x")
    pool.release(known)
    pool.release(unknown)
    assert pool.allocate(1) == unknown


def test_of_two_blocks_with_one_content_the_first_is_found() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"x")
    pool.publish(second, b"x")
    assert pool.find(b"x") == first
    assert pool.block_hash(second) is None
    pool.check_integrity([[first, second]])


def test_only_a_held_block_without_hash_can_be_published() -> None:
    pool = BlockPool(1)
    with pytest.raises(RuntimeError, match="cannot be published"):
        pool.publish(0, b"x")
    pool.allocate(1)
    pool.publish(0, b"x")
    with pytest.raises(RuntimeError, match="cannot be published"):
        pool.publish(0, b"y")


def test_a_withdrawn_block_is_found_no_more() -> None:
    pool = BlockPool(2)
    table = pool.allocate(2)
    pool.publish(table[0], b"x")
    pool.withdraw(table)
    assert pool.find(b"x") is None
    pool.publish(table[0], b"y")
    pool.check_integrity([table])


def test_free_blocks_among_found_ones_are_counted() -> None:
    pool = BlockPool(3)
    assert pool.num_free_among(pool.allocate(2)) == 0
    assert pool.num_free_among([0, 1, 2]) == 1


def test_check_integrity_finds_what_is_wrong() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="twice in the table"):
        pool.check_integrity([[table[0], table[0]]])
    pool._free[table[0]] = None
    with pytest.raises(AssertionError, match="free list"):
        pool.check_integrity([table])
    del pool._free[table[0]]
    pool.publish(table[0], b"x")
    pool._block_of_hash[b"y"] = table[0]
    with pytest.raises(AssertionError, match="two hashes"):
        pool.check_integrity([table])
    del pool._block_of_hash[b"x"]
    with pytest.raises(AssertionError, match="disagree"):
        pool.check_integrity([table])
