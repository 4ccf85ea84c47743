"""Records piece by piece: together they are the records of the whole run, and each ends with a step."""

from itertools import pairwise
from typing import Any, get_type_hints

import numpy as np
import pytest

from moesim.core.record_table import RecordTable
from moesim.engine import simulate
from moesim.engine.native import AVAILABLE
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.model import load_model
from moesim.policies.registry import make_policy
from moesim.records import KINDS, Records
from moesim.trace import Trace
from moesim.trace.workload import WorkloadSpec, compose
from tests.engine.engine_kit import assert_same

ENGINES = ["simpy", *(["native"] if AVAILABLE else [])]


def _run(policy: str = "lru", **more: Any) -> Records:
    model, hardware = load_model({"base": "mixtral-8x7b", "expert_bits": 4}), load_hardware("rtx3090-epyc7532")
    rng = np.random.default_rng(3)
    experts = np.argsort(rng.random((24, model.n_layers, model.n_experts)), axis=2)[:, :, : model.top_k]
    trace = Trace.build(experts=experts, n_prompt=[2, 2], n_decode=[10, 10], n_experts=8, model=model.name, label="synthetic")
    return simulate(
        model=model, costs=CostModel(model, hardware), workload=compose(trace, WorkloadSpec(batch_size=2)),
        policy=make_policy({"name": policy}), cache_slots={"gpu0": 64}, **more,
    )  # fmt: skip


def _copied(records: Records) -> Records:
    found = Records(used_fetches=set(records.used_fetches))
    for name in KINDS:
        getattr(found, name).extend(getattr(records, name))
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("piece", "policy"), [(1, "lru"), (100, "lru"), (400, "lru"), (10**6, "lru"), (1, "background-cache")])
def test_pieces_add_up_to_the_run(piece: int, policy: str, engine: str):
    pieces: list[Records] = []
    settled: list[int] = []

    def take(records: Records, settled_ns: int) -> None:
        pieces.append(_copied(records))
        settled.append(settled_ns)

    rest = _run(policy, sink=take, piece=piece, engine=engine)
    whole, joined = (
        _run(policy, engine=engine),
        Records(makespan_ns=rest.makespan_ns, peak_bytes=rest.peak_bytes, pool_peak_bytes=rest.pool_peak_bytes),
    )
    for one in pieces:
        joined.used_fetches |= one.used_fetches
        for name in KINDS:
            getattr(joined, name).extend(getattr(one, name))
    assert_same(whole, joined)
    least, most = {1: (len(whole.steps),) * 2, 10**6: (1, 1)}.get(piece, (2, len(whole.steps)))
    assert least <= len(pieces) <= most
    assert settled[-1] == whole.makespan_ns
    for (before, after), since in zip(pairwise(pieces), settled, strict=False):
        cut = before.steps[-1].end
        assert len(before.tasks) >= piece
        assert all(r.end <= cut for r in (*before.tasks, *before.transfers, *before.activations))
        assert all(r.end >= cut for r in (*after.tasks, *after.transfers, *after.activations))
        assert since == min([cut, *(r.start for r in (*after.tasks, *after.transfers, *after.activations))])
    under_way = [since < before.steps[-1].end for before, since in zip(pieces, settled, strict=True)]
    assert any(under_way) == (policy != "lru"), under_way
    assert not len(rest.tasks) and rest.makespan_ns == whole.makespan_ns


def test_a_sink_that_raises_ends_the_run():
    def full(records: Records, settled_ns: int) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        _run(sink=full, piece=1)


def test_columns_are_the_tuples():
    records, again = _run(), _run()
    for name, kind in KINDS.items():
        table, hints = getattr(records, name), get_type_hints(kind)
        other = RecordTable(kind, list(table))
        assert len(table) == len(other) and table == other
        for field in kind._fields:
            values = [getattr(one, field) for one in table]
            for of in (table, other):
                if hints[field] is str:
                    codes, texts = of.texts(field)
                    assert [texts[code] for code in codes] == values
                elif hints[field] == tuple[int, ...]:
                    offsets, flat = of.lists(field)
                    assert [tuple(flat[a:b]) for a, b in pairwise(offsets)] == values
                else:
                    assert [None if value != value else value for value in of.column(field).tolist()] == values
        places = np.array([len(table) - 1, 0, 0]) if len(table) else np.zeros(0, np.int64)
        wanted = [table[place] for place in places]
        assert other.some(places) == wanted  # of tuples
        assert getattr(again, name).some(places) == wanted  # of columns, where the engine has left those
