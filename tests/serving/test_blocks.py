"""Blocks of KV cache: allocated, shared, cached and given back."""

from __future__ import annotations

import random

import pytest

from moesim.errors import SimulationError
from moesim.serving.blocks import Blocks
from moesim.serving.requests import Request, Routing


def request(number: int, prompt: int, blocks: tuple[int, ...] = ()) -> Request:
    return Request(number, 0, prompt, 8, Routing(0, 1, 0, 1, 1, 0), blocks=blocks, block_tokens=4)


def test_blocks_grow_with_tokens():
    pool, one = Blocks(3, 4), request(0, 10)
    assert pool.grow(one, 4) and pool.available == 2
    assert pool.grow(one, 4) and pool.available == 2
    assert pool.grow(one, 9) and pool.available == 0
    assert not pool.grow(one, 13) and pool.of(one) == 3


def test_prompts_that_begin_alike_share_blocks():
    pool, one, two = Blocks(5, 4), request(0, 10, (1, 2, 3)), request(1, 10, (1, 2, 9))
    pool.grow(one, 10)  # two full blocks, and one that only has two tokens
    assert pool.match(two, 9) == 2 and pool.idle(two, 2) == 0
    assert pool.admit(two, 2, 10) and pool.available == 1
    one.computed = 10
    pool.release(one)
    assert pool.available == 2  # the two that are shared stay in use
    pool.check()


def test_the_least_recently_used_block_is_evicted_first_and_a_prompts_last_before_its_first():
    pool, one, two = Blocks(4, 4), request(0, 8, (1, 2)), request(1, 8, (5, 6))
    for each in (one, two):
        pool.grow(each, 8)
        each.computed = 8
        pool.release(each)
    assert list(pool.cached) == [(2, 1), (1, 0), (6, 1), (5, 0)]
    pool.grow(request(2, 4), 4)
    assert pool.match(request(3, 8, (1, 2)), 8) == 1
    assert pool.match(request(3, 8, (5, 6)), 8) == 2


def test_only_what_was_computed_is_found_again():
    pool, one = Blocks(4, 4), request(0, 8)
    pool.grow(one, 12)
    one.computed = 7
    pool.release(one)
    one.give_up()
    assert pool.match(one, 12) == 1 and pool.free == 3


def test_a_prompt_without_hashes_needs_no_size_of_their_blocks():
    pool, one = Blocks(4, 4), Request(0, 0, 8, 2, Routing(0, 1, 0, 1, 1, 0))
    assert pool.admit(one, pool.match(one, 7), 8)
    one.computed = 8
    pool.release(one)
    assert list(pool.cached) == [(-1, 1), (-1, 0)]


def test_a_reserved_block_is_not_shared_before_it_is_written():
    pool, one, two = Blocks(8, 4), request(0, 8, (1, 2)), request(1, 8, (1, 2))
    pool.admit(one, 0, 16, written=0)
    assert pool.match(two, 8) == 0
    pool.grow(one, 4, written=4)
    assert pool.match(two, 8) == 1


def test_a_second_copy_is_freed_when_the_first_is_cached():
    pool, one, two = Blocks(4, 4), request(0, 4, (1,)), request(1, 4, (1,))
    pool.grow(one, 4, written=0)
    pool.grow(two, 4)
    pool.grow(one, 4)  # another has it: this copy stays its own
    for each in (one, two):
        each.computed = 4
        pool.release(each)
    assert (pool.free, list(pool.cached)) == (3, [(1, 0)])
    pool.check()


def test_blocks_are_conserved():
    rng = random.Random(7)
    pool, present = Blocks(20, 4), list[Request]()
    for number in range(400):
        if rng.random() < 0.6:
            new = request(number, rng.randint(1, 30), tuple(range(8)) if rng.random() < 0.5 else ())
            found = pool.match(new, new.prompt - 1)
            if pool.admit(new, found, min(new.prompt, found * 4 + rng.randint(1, 12))):
                new.computed = found * 4
                present.append(new)
        elif present:
            old = present.pop(rng.randrange(len(present)))
            old.computed = rng.randint(0, pool.of(old) * 4)
            pool.release(old)
        pool.check()
    for old in present:
        pool.release(old)
    assert pool.available == 20


def test_a_lost_block_is_an_error():
    pool = Blocks(3, 4)
    pool.free -= 1
    with pytest.raises(SimulationError, match="expected 3 blocks, got 0 in use, 2 free and 0 cached"):
        pool.check()
