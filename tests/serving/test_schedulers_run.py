"""Every scheduler in a whole run, on both engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesim.errors import CapacityError
from moesim.serving import SCHEDULERS
from tests.engine.engine_kit import assert_same
from tests.serving.serving_kit import run

OPTIONS: dict[str, dict[str, Any]] = {
    "sglang": {"chunked_prefill_size": 8},
    "strata": {"parallel": 2, "prefill": 4},
    "static": {"size": 2},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_both_engines_are_the_same(name: str):
    scheduler = json.dumps({"name": name} | OPTIONS.get(name, {}))
    asked = {"closed": 3, "n_requests": 5, "prompt_tokens": 6, "answer_tokens": 3, "scheduler": scheduler}
    records = [run(asked, engine=engine) for engine in ("simpy", "native")]
    assert_same(*records)
    assert records[0].served is not None
    assert [one.generated for one in records[0].served.requests] == [3] * 5


@pytest.mark.parametrize(("name", "cached"), [("vllm", 512), ("sglang", 512), ("llama-server", 512), ("static", 0)])
def test_hashes_of_a_file_of_requests_are_used(name: str, cached: int, tmp_path: Path):
    file = tmp_path / "requests.jsonl"
    lines = ((0, [1, 2]), (900_000, [1, 3]))  # ms, blocks of 512 tokens
    file.write_text("".join(
        json.dumps({"timestamp": ms, "input_length": 600, "output_length": 2, "hash_ids": ids}) + "\n" for ms, ids in lines
    ))  # fmt: skip
    options = {"page_size": 16} if name == "sglang" else {}
    found = run({"arrivals": str(file), "scheduler": json.dumps({"name": name} | options)})
    assert found.served is not None
    assert [one.cached for one in found.served.requests] == [0, cached]


def test_kv_cache_beyond_the_memory_names_what_asked_for_it():
    words = "lower the cache ratio, kv_tokens of the scheduler or its requests at once, or choose"
    with pytest.raises(CapacityError, match=words):
        run({"closed": 1, "n_requests": 1, "scheduler": {"name": "vllm", "kv_tokens": 10**7}})
