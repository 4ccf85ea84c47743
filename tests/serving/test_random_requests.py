"""Random mixes of requests and options: every request ends or is refused, what must add up does, and a second run is the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moesim.errors import WorkloadError
from moesim.serving import SCHEDULERS
from moesim.serving.drafts import Drafts
from moesim.serving.scheduler import options_of
from tests.serving.stepping_kit import Asked, run

MIXES = 200
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {  # what is drawn of each option
    "llama-server": {"parallel": (1, 2, 5), "batch": (1, 8, 40), "ubatch": (1, 8, 64), "slot_prompt_similarity": (0, 0.1, 0.9)},
    "vllm": {
        "max_num_batched_tokens": (1, 8, 64), "max_num_seqs": (1, 3, 256), "block_size": (1, 4, 16),
        "long_prefill_token_threshold": (0, 3), "chunked": (True, False), "prefix_caching": (True, False),
    },
    "sglang": {
        "chunked_prefill_size": (4, 8, 64), "max_prefill_tokens": (4, 100), "max_running_requests": (1, 3, 100),
        "mixed_chunk": (True, False), "page_size": (1, 4), "schedule_conservativeness": (0, 0.1, 1.0),
        "radix_cache": (True, False),
    },
    "freetoken": {"max_prefill_length": (4, 9, 64), "max_running_requests": (1, 4), "page_size": (1, 4)},
    "ktransformers": {
        "chunk_size": (4, 9, 64), "max_batch_size": (1, 2, 4), "page_size": (4, 16), "single_prefill": (True, False),
    },
    "strata": {"parallel": (1, 2, 11), "prefill": (4, 16), "decode_share": (0, 0.5, 2.0), "batch_mtp": (True, False)},
    "static": {"size": (1, 3, 50), "prefill_chunk": (0, 5)},
}  # fmt: skip
PREFIXES = (((), 0), ((1, 2, 3, 4, 5, 6, 7, 8), 32), ((1, 2, 9, 10, 11, 12), 24))


def asked(rng: random.Random) -> list[Asked]:
    now, found = 0, []
    for _ in range(rng.randint(1, 12)):
        now += rng.choice((0, 0, 1, 5, 40))
        blocks, most = rng.choice(PREFIXES)
        prompt = rng.randint(1, most or 30)
        found.append(Asked(now, prompt, rng.randint(1, rng.choice((3, 12, 60))), blocks[: -(-prompt // 4)]))
    return found


def drawn(name: str, seed: int) -> tuple[dict[str, Any], list[Asked], Drafts | None]:
    rng = random.Random(f"{name} {seed}")
    requests = asked(rng)
    options = {"name": name, **{key: rng.choice(values) for key, values in OPTIONS[name].items()}}
    if rng.random() < 0.5:  # little room, in which they wait, are preempted or refused
        options["kv_tokens"] = max(1, max(one.prompt + one.answer for one in requests) + rng.randint(-9, 30))
    drafts = Drafts(n := rng.randint(1, 4), (0.9, 0.7, 0.5, 0.2)[:n]) if rng.random() < 0.4 else None
    return options, requests, drafts


def test_every_scheduler_and_option_is_drawn():
    known = {name: set(options_of(made)) for name, made in SCHEDULERS.items()}
    assert {name: {*options, "kv_tokens"} for name, options in OPTIONS.items()} == known


@pytest.mark.parametrize("name", OPTIONS)
def test_all_requests_end_or_are_refused(name: str):
    waited = cached = preempted = 0
    for seed in range(MIXES):
        options, requests, drafts = drawn(name, seed)
        if name == "ktransformers" and options["chunk_size"] < options["max_batch_size"]:
            options["chunk_size"] = options["max_batch_size"]
        try:
            found = run(options, requests, drafts=drafts)
        except WorkloadError as error:
            if "expected a request that can be served, got none" not in str(error):
                raise
            continue
        assert len(found.records) == len(requests)
        assert all(one.refused or one.generated == one.answer for one in found.records), (options, requests)
        waited += any(one.start > one.arrival for one in found.records)
        cached += any(one.cached for one in found.records)
        preempted += any(one.preempted for one in found.records)
        if seed % 10 == 0:
            again = run(options, requests, drafts=drafts)
            assert (again.steps, again.records) == (found.steps, found.records)
    # The mixes are no idle ones.
    assert waited > 20
    assert (cached > 20) == (name != "static")
    assert preempted > 2 if name in ("vllm", "sglang") else not preempted
