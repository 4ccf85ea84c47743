"""Drafts of served requests: windows, acceptance, what the drafter costs, and wrong input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.errors import WorkloadError
from moesim.records import Records
from moesim.serving.drafts import draft_runs, read_drafts
from moesim.serving.requests import Request, Routing
from moesim.trace import Trace
from tests.serving.serving_kit import experiment, run


def served(drafts: dict[str, Any] | None, engine: str = "native", **changes: Any) -> Records:
    asked = {"closed": 1, "n_requests": 1, "prompt_tokens": 6, "answer_tokens": 22, "drafts": drafts}
    more = {"trace": changes.pop("trace")} if "trace" in changes else {}
    return run(asked | changes, engine=engine, **more)


def test_windows_in_which_all_is_accepted_bring_as_many_tokens_as_rows():
    found = served({"n": 2, "accept": 1, "by": "ngram"})
    assert found.served is not None
    (one,) = found.served.requests
    assert one.generated == 22
    prompt, *windows = found.steps
    assert [step.n_tokens for step in windows] == [3] * 7  # 21 tokens after the first
    assert [step.n_sequences for step in (prompt, *windows)] == [1] + [3] * 7
    assert sorted(found.served.gaps)[:14] == [0] * 14, "tokens of a window come together"


def test_refused_drafts_cost_rows_and_bring_one_token():
    found = served({"n": 2, "accept": 0, "by": "ngram"})
    windows = found.steps[1:]
    assert [step.n_sequences for step in windows] == [1] * 21
    assert [step.n_tokens for step in windows] == [3] * 19 + [2, 1], "nothing is proposed beyond the answer"


@pytest.mark.parametrize("engine", ["simpy", "native"])
def test_a_head_runs_once_for_each_draft_before_the_step(engine: str):
    found = served({"n": 2, "accept": 1}, engine)
    drafts = [task for task in found.tasks if task.kind == "draft"]
    assert len(drafts) == 7
    (spec,) = experiment({"closed": 1, "prompt_tokens": 6}).specs
    costs = spec.costs(None)
    assert drafts[0].work == 2 * costs.draft_ns("gpu0", 1, 2 * 6 + 1)
    begins = {step.step: step.begin for step in found.steps}
    assert all(task.start == begins[task.step] for task in drafts)


def test_a_model_of_its_own_takes_its_time_for_each_draft():
    plain, slow = served({"n": 2, "accept": 1, "by": "ngram"}), served({"n": 2, "accept": 1, "by": "model", "draft_ms": 5})
    assert slow.makespan_ns - plain.makespan_ns == 7 * 2 * 5_000_000


def test_both_engines_draw_the_same_windows():
    asked = {"n": 3, "accept": [0.7, 0.45, 0.33]}
    assert served(asked, "simpy") == served(asked, "native")


@pytest.mark.parametrize("engine", ["simpy", "native"])
def test_a_window_asks_for_the_experts_of_neighbouring_tokens(engine: str, tmp_path: Path):
    turn = np.arange(30)[:, None, None] + np.arange(2)  # a token and the next share one of two experts, others none
    trace = Trace.build(
        experts=np.broadcast_to(turn % 8, (30, 32, 2)), n_prompt=[6], n_decode=[24], n_experts=8, model="mixtral-8x7b",
        label="synthetic",
    )  # fmt: skip
    trace.write(path := tmp_path / "turn.safetensors")
    found = served({"n": 2, "accept": 1, "by": "ngram"}, engine, trace=str(path))
    windows = [one for one in found.lookups if one.step]
    assert len(windows) == 7 * 32
    assert all(sorted(one.loads) == [1, 1, 2, 2] for one in windows), "three tokens, four experts; apart they have six"


def test_as_many_are_accepted_as_stated():
    shares, rng = (0.7, 0.45, 0.33, 0.21), np.random.default_rng(5)
    drafts = read_drafts({"n": 4, "accept": list(shares)})
    drawn = np.array([drafts.accepted(4, rng) for _ in range(20_000)])
    for i, share in enumerate(shares):
        assert abs((drawn > i).mean() - share) < 3.5 * np.sqrt(share * (1 - share) / len(drawn))
    assert read_drafts({"n": 3, "accept": 0.5}).accept == (0.5, 0.25, 0.125)


def test_drafts_that_stop_by_themselves_have_as_many_rows_as_were_proposed():
    shares, rng = (0.9, 0.6, 0.2), np.random.default_rng(6)
    drafts = read_drafts({"n": 3, "accept": 1, "proposed": list(shares)})
    one = Request(0, 0, 4, 1000, Routing(0, 4, 0, 4, 4, 0), generated=1)
    drawn = []
    for _ in range(20_000):
        drafts.propose(one, rng)
        drawn.append((one.drafts, one.draft_runs))
    lengths = np.array(drawn)[:, 0]
    for i, share in enumerate(shares):
        assert abs((lengths > i).mean() - share) < 3.5 * np.sqrt(share * (1 - share) / len(lengths))
    assert set(drawn) == {(0, 1), (1, 2), (2, 3), (3, 3)}, "the drafter has run for the draft at which it stops"


def test_a_drafter_that_never_goes_on_costs_one_run_a_step():
    plain, none = served(None), served({"n": 3, "accept": 1, "proposed": 0, "by": "model", "draft_ms": 5})
    assert [step.n_tokens for step in none.steps] == [step.n_tokens for step in plain.steps]
    assert none.makespan_ns - plain.makespan_ns == 20 * 5_000_000, "none for the last token"


def test_sequences_that_have_stopped_leave_the_drafters_next_run():
    long, short = (Request(i, 0, 4, 9, Routing(0, 4, 0, 4, 4, 0), computed=10 * i) for i in (1, 2))
    long.draft_runs, short.draft_runs = 3, 1
    assert draft_runs([long, short]) == ((2, 21 + 41), (1, 21), (1, 21))


def test_both_engines_draw_the_same_lengths():
    asked = {"n": 3, "accept": 0.7, "proposed": [0.9, 0.6, 0.3]}
    found = served(asked, "simpy", closed=2, n_requests=3)
    assert found == served(asked, "native", closed=2, n_requests=3)
    assert len({step.n_tokens for step in found.steps[1:]}) > 2


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"n": 0, "accept": 1}, "workload.drafts.n: expected drafts of a step, 1 to 64, got 0"),
        ({"n": 2, "accept": 1.5}, "workload.drafts.accept: expected a share"),
        ({"n": 2, "accept": [0.5]}, "workload.drafts.accept: expected a share"),
        ({"n": 2, "accept": [0.5, 0.6]}, "workload.drafts.accept: expected a share"),
        ({"n": 2, "accept": 1, "by": "eagle"}, "workload.drafts.by: unknown drafter 'eagle'"),
        ({"n": 2, "accept": 1, "by": "model"}, "workload.drafts.draft_ms: expected milliseconds of a draft with by: model"),
        ({"n": 2, "accept": 1, "draft_ms": 2}, "workload.drafts.draft_ms: expected milliseconds of a draft with by: model"),
        ({"n": 2, "accept": 1, "proposed": [0.5]}, "workload.drafts.proposed: expected a share for each draft given that all"),
        ({"n": 2, "accept": 1, "p_min": 0.7}, "workload.drafts.p_min: expected proposed, the share of windows with a draft"),
        ({"n": 2, "accept": 1, "p": 2}, "workload.drafts: unknown key 'p'"),
    ],
)
def test_wrong_drafts(written: dict[str, Any], message: str):
    with pytest.raises(WorkloadError) as error:
        read_drafts(written)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_head_takes_memory_and_copies_of_the_text_take_none():
    head, free = served({"n": 1, "accept": 1}), served({"n": 1, "accept": 1, "by": "ngram"})
    (spec,) = experiment({"closed": 1, "prompt_tokens": 6}).specs
    model = spec.model
    layer = sum(model.part_bytes(part, 31) for part in ("attention", "dense", "shared")) + 8 * model.expert_bytes(31)
    more = head.peak_bytes["gpu0"] - free.peak_bytes["gpu0"]
    assert more == layer + model.kv_bytes(31, 4 * (6 + 22), 4), "llama-server reserves four slots"
