"""Experts of several widths, and outputs that come a layer late.

The model has experts of 16 bits, 1000 bytes each, and of 4 bits, 250 bytes each. An expert of 4 bits takes 60 ns on the GPU
and 150 on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from moesim.errors import ModelError, PolicyError
from moesim.model import load_model
from moesim.policy import Copy, Drop, Fetch, Move, Pool, Run
from moesim.records import InexactRecord
from tests.engine.engine_kit import (
    ALL,
    ONE,
    TWO,
    Script,
    cpu,
    crossings,
    flat,
    gpu,
    machine,
    on_gpu,
    play,
    tasks,
    tiny_model,
    transfers,
)

TWO_WIDTHS = tiny_model(expert_bits=[16, 4])
NARROW = {"hidden": 5, "intermediate": 50, "bits": 4.0}
ROUTED = ("Routed", 0, 0, 0)
LAST = ("Routed", 0, 1, 0)


def two_widths() -> Any:
    fast, slow = gpu(), cpu()
    fast["experts"].append(flat(60, shape=NARROW))
    slow["experts"].append(flat(150, shape=NARROW))
    return machine({"gpu0": fast, "cpu0": slow})


def run(on: dict[Any, Any], work: Any = ONE, **more: Any) -> Any:
    more = {"copies": ALL, "exact": False} | more
    decision_ns = more.pop("decision_ns", 0)
    return play(Script(on, routed=on_gpu, **more), work, two_widths(), model=TWO_WIDTHS, decision_ns=decision_ns)


# -------------------------------------------------------------------------------------------------------------- widths
def test_a_copy_moves_and_fills_the_bytes_of_its_width_and_a_run_at_it_costs_its_time() -> None:
    # gpu0       |DDDDD|00000|    |1:60|      expert 0 at 16 bits was there; 1 comes at 4 bits
    # cpu0->gpu0       |1: 250    |
    #            0    100   200  350  410
    script = {ROUTED: [Fetch(0, [1], "gpu0", bits=4), Run(0, [0], "gpu0"), Run(0, [1], "gpu0", bits=4)]}
    records = run(script, copies=[Copy(0, [0], "gpu0"), ALL[1]])
    assert transfers(records) == [(100, 350, "cpu0->gpu0", "demand 0/1")]
    assert [(t.n_bytes, t.bits) for t in records.transfers] == [(250, 4)]
    assert tasks(records)[:3] == [(0, 100, "gpu0", "dense"), (100, 200, "gpu0", "E0x1"), (350, 410, "gpu0", "E1x1")]
    assert [t.bits for t in records.tasks if t.layer == 0 and t.kind == "expert"] == [None, 4]
    assert records.pool_peak_bytes["gpu0", "cache"] == 5000 + 250


def test_slots_served_below_full_width_are_counted() -> None:
    script = {ROUTED: [Run(0, [0], "gpu0"), Run(0, [1], "gpu0", bits=4)]}
    records = run(script, copies=[*ALL, Copy(0, [1], "gpu0", bits=4)], slots=9)
    assert records.inexact == [InexactRecord(0, 0, "reduced", 1, 0.25)]
    with pytest.raises(PolicyError, match="an exact policy served slots otherwise than fresh: 2 reduced; run what is routed"):
        run({ROUTED: [Run(0, [0, 1], "cpu0", bits=4)]}, exact=True)


def test_what_is_stale_or_substituted_is_so_before_it_is_reduced() -> None:
    script = {
        ROUTED: [Run(0, [0], "gpu0"), Run(0, [3], "cpu0", [0], bits=4), Run(1, [2], "cpu0", [0], inputs_from=0, bits=4)],
        LAST: [Run(1, [3], "gpu0")],
    }
    records = run(script)
    assert records.inexact == [InexactRecord(0, 0, "substituted", 1, 0.25), InexactRecord(0, 1, "stale", 1, 0.75)]


def test_the_host_has_every_width() -> None:
    records = run({ROUTED: [Run(0, [0], "gpu0"), Run(0, [1], "cpu0", bits=4)]})
    assert (120, 270, "cpu0", "E1x1") in tasks(records)
    assert crossings(records) == [(100, 120, "gpu0->cpu0", "in", 1), (270, 290, "cpu0->gpu0", "out", 1)]


def test_the_full_width_may_be_named() -> None:
    named = run({ROUTED: [Fetch(0, [2], "gpu0", bits=16), Run(0, [0, 1], "gpu0", bits=16.0)]})
    assert named == run({ROUTED: [Fetch(0, [2], "gpu0"), Run(0, [0, 1], "gpu0")]})
    assert named.inexact == []


def test_copies_of_two_widths_live_side_by_side() -> None:
    seen: dict[str, Any] = {}

    def look(event: Any, view: Any) -> list[Any]:
        seen["there"] = [view.is_resident(0, 1, "gpu0"), view.is_resident(0, 1, "gpu0", 4), view.is_resident(0, 1, "cpu0", 4)]
        seen["residency"] = [view.residency(0, "gpu0"), view.residency(0, "gpu0", 4)]
        seen["residents"] = [view.residents("gpu0", "cache"), view.residents("gpu0", "cache", None, 4)]
        seen["of_layer"] = [view.residents("gpu0", "cache", 1), view.residents("gpu0", "cache", 1, 4)]
        seen["free"] = view.free_bytes("gpu0", "cache")
        return [Fetch(0, [3], "gpu0", bits=4), Run(0, [0], "gpu0"), Run(0, [1], "gpu0", bits=4)]

    def later(event: Any, view: Any) -> list[Any]:
        seen["in use"] = [view.is_in_use(0, 1, "gpu0"), view.is_in_use(0, 1, "gpu0", 4)]
        seen["pending"] = [view.is_pending(0, 3, "gpu0"), view.is_pending(0, 3, "gpu0", 4)]
        seen["remaining"] = [view.remaining_ns(0, 3, "gpu0"), view.remaining_ns(0, 3, "gpu0", 4)]
        return []

    copies = [Copy(0, [0, 1], "gpu0"), Copy(0, [1, 2], "gpu0", bits=4), ALL[1]]
    run({ROUTED: look, ("Ran", 0, 0, 0, "gpu0"): later}, copies=copies)
    assert seen == {
        "there": [True, True, True],
        "residency": [b"\x01\x01\x00\x00", b"\x00\x01\x01\x00"],
        "residents": [[(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)], [(0, 1), (0, 2)]],
        "of_layer": [[0, 1, 2, 3], []],
        "free": 8000 - 6 * 1000 - 2 * 250,
        "in use": [False, True],
        "pending": [False, True],
        "remaining": [0, 150],
    }


def test_dropping_or_moving_a_copy_leaves_that_of_the_other_width() -> None:
    seen = []

    def look(event: Any, view: Any) -> list[Any]:
        seen.append([view.residents("gpu0", pool, 0, bits) for pool in ("cache", "other") for bits in (None, 4)])
        return [Run(0, [0, 1], "gpu0")]

    script = {("LayerBegin", 0, 0): [Drop(0, [2], "gpu0", bits=4), Move(0, [3], "gpu0", "other", bits=4)], ROUTED: look}
    pools = [Pool("gpu0", "cache", 10_000), Pool("gpu0", "other", 250)]
    records = run(script, copies=[*ALL, Copy(0, [2, 3], "gpu0", bits=4)], pools=pools)
    assert seen == [[[0, 1, 2, 3], [], [], [3]]]
    assert [(e.layer, e.expert, e.reason, e.bits) for e in records.evictions] == [(0, 2, "drop", 4)]


def test_a_victim_is_named_with_its_width() -> None:
    # 1250 bytes: room for one expert of each width. Expert 1 at 16 bits needs both of them out, one after the other.
    script = {ROUTED: [Run(0, [0], "cpu0"), Fetch(0, [1], "gpu0"), Run(0, [1], "gpu0")], LAST: [Run(1, [2, 3], "cpu0")]}
    pools = [Pool("gpu0", "cache", 1250)]
    copies = [Copy(0, [2], "gpu0"), Copy(0, [3], "gpu0", bits=4)]
    records = run(script, copies=copies, pools=pools, evict=[(0, 3, 4), (0, 2)])
    assert [(e.expert, e.bits) for e in records.evictions] == [(3, 4), (2, None)]
    assert records.pool_peak_bytes["gpu0", "cache"] == 1250
    with pytest.raises(PolicyError, match=r"named L0/E3: not resident in pool 'cache'; name a resident"):
        run(script, copies=copies, pools=pools, evict=[(0, 3), (0, 2)])


def test_what_is_routed_stays_in_use_at_every_width_while_a_decision_is_made() -> None:
    seen: dict[int, list[bool]] = {}

    def look(fetch: Fetch, view: Any) -> None:
        seen[view.now_ns] = [view.is_in_use(0, 0, "gpu0"), view.is_in_use(0, 1, "gpu0", 4), view.is_in_use(0, 2, "gpu0", 4)]

    script = {
        # The first arrives at 250, in the middle of the decision; then there is no room for the second.
        ("LayerBegin", 0, 0): [Fetch(1, [0], "gpu0", 2, bits=4), Fetch(1, [1], "gpu0", 2)],
        ROUTED: [Run(0, [0], "gpu0"), Run(0, [1], "gpu0", bits=4)],
    }
    copies = [Copy(0, [0], "gpu0"), Copy(0, [1, 2], "gpu0", bits=4), Copy(1, [2, 3], "gpu0")]
    run(script, copies=copies, slots=4, decision_ns=300, evict=look)
    assert seen[250] == [True, True, False]


WIDTHS = "set model.expert_bits to a list with 8; it has 16 and 4"
UNKNOWN = {
    "Fetch": Fetch(0, [1], "gpu0", bits=8),
    "Run": Run(0, [1], "gpu0", bits=8),
    "Drop": Drop(0, [1], "gpu0", bits=8),
    "Move": Move(0, [1], "gpu0", "cache", bits=8),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_bits_that_the_model_does_not_have(name: str) -> None:
    with pytest.raises(PolicyError, match=rf"{name}\(L0.*: no experts of 8 bits; {WIDTHS}"):
        run({ROUTED: [UNKNOWN[name]]})


def test_bits_that_the_model_does_not_have_elsewhere() -> None:
    with pytest.raises(PolicyError, match=f"no experts of 8 bits; {WIDTHS}"):
        run({ROUTED: lambda event, view: [view.is_resident(0, 0, "gpu0", 8)]})
    with pytest.raises(PolicyError, match=rf"place\(\): copies of layer 0: no experts of 8 bits; {WIDTHS}"):
        run({}, copies=[Copy(0, [0], "gpu0", bits=8)])
    with pytest.raises(PolicyError, match="no experts of 8 bits"):
        run({ROUTED: [Fetch(0, [1], "gpu0"), Run(0, [0], "cpu0"), Run(0, [1], "gpu0")]}, copies=[Copy(0, [3], "gpu0")],
            pools=[Pool("gpu0", "cache", 1000)], evict=[(0, 3, 8)])  # fmt: skip


@pytest.mark.parametrize("bits", [[4, 4], [2, 4], [], [4, "2"], [4, 0]])
def test_widths_of_a_model_fall(bits: Any) -> None:
    with pytest.raises(ModelError, match=r"expert_bits: expected"):
        load_model({"base": "mixtral-8x7b", "expert_bits": bits})


def test_widths_count_in_bytes_and_fingerprint() -> None:
    one, two = load_model({"base": "mixtral-8x7b", "expert_bits": 4}), load_model({"base": "mixtral-8x7b", "expert_bits": [4, 2]})
    assert two.widths == (4, 2)
    assert two.expert_bytes(0, 2) == one.expert_bytes(0) // 2
    assert two.experts_bytes_total == one.experts_bytes_total * 3 // 2
    assert "low_bits" not in one.figures() and two.figures()["low_bits"] == (2,)


def test_widths_of_gguf_blocks() -> None:
    # Q4_K has 144 bytes for 256 weights, Q2_K 84; a file's own bytes, layer by layer, may stand for the full width.
    blocks = 3 * 4096 * 14336 // 256
    model = load_model({"base": "mixtral-8x7b", "expert_bits": [4.5, 2.625]})
    assert [model.expert_bytes(0, bits) for bits in model.widths] == [144 * blocks, 84 * blocks]
    by_layer = [144 * blocks] * 31 + [210 * blocks]
    for low in (2.625, [2.625]):
        mixed = load_model({"base": "mixtral-8x7b", "expert_bytes_by_layer": by_layer, "low_bits": low})
        assert [mixed.expert_bytes(31), mixed.expert_bytes(31, 2.625)] == [210 * blocks, 84 * blocks]
    with pytest.raises(ModelError, match=r"expert_bits: expected numbers of bits .*, got 16, 17"):
        load_model({"base": "mixtral-8x7b", "expert_bytes_by_layer": by_layer, "low_bits": 17})


# ---------------------------------------------------------------------------------------------------------------- late
def test_a_late_output_does_not_hold_its_own_layer_but_the_next() -> None:
    # gpu0       |DDDDD|00000|DDDDD|22222|33333|       layer 0 ends at 200, layer 1 at 560
    # cpu0       |     |in|1: 400             |
    # cpu0->gpu0 |                             |out
    #            0    100   200   300   400 520 540
    script = {ROUTED: [Run(0, [0], "gpu0"), Run(0, [1], "cpu0", late=True)]}
    records = run(script)
    assert [(x.begin, x.end) for x in records.layers] == [(0, 200), (200, 540)]
    assert crossings(records) == [(100, 120, "gpu0->cpu0", "in", 1), (520, 540, "cpu0->gpu0", "out", 1)]
    assert records.inexact == [InexactRecord(0, 0, "late", 1, 0.25)]
    in_time = run({ROUTED: [Run(0, [0], "gpu0"), Run(0, [1], "cpu0")]})
    assert [x.end for x in in_time.layers] == [540, 840]


def test_late_rows_may_be_named_and_may_run_on_the_device_of_the_dense_part() -> None:
    # Expert 1 is late for row 1 only, on the GPU: its task still runs before layer 1's dense part, which was submitted later.
    script = {ROUTED: [Run(0, [1], "gpu0", [1], late=True), Run(0, [0, 1, 2], "gpu0")]}
    records = run(script, TWO)
    assert records.inexact == [InexactRecord(0, 0, "late", 1, 0.75)]
    assert tasks(records)[1:5] == [
        (100, 200, "gpu0", "E1x1"), (200, 300, "gpu0", "E0x1"), (300, 400, "gpu0", "E1x1"), (400, 500, "gpu0", "E2x1")
    ]  # fmt: skip


def test_late_and_reduced_together_is_late() -> None:
    records = run({ROUTED: [Run(0, [0], "gpu0"), Run(0, [1], "cpu0", bits=4, late=True)]})
    assert [one.kind for one in records.inexact] == ["late"]
    assert (120, 270, "cpu0", "E1x1") in tasks(records)


def test_the_last_layer_cannot_be_late() -> None:
    with pytest.raises(PolicyError, match=r"Run\(L1, cpu0, late\): no layer comes after it; run the last layer's experts in"):
        run({LAST: [Run(1, [2, 3], "cpu0", late=True)]})


def test_an_exact_policy_cannot_be_late() -> None:
    with pytest.raises(PolicyError, match="an exact policy served slots otherwise than fresh: 1 late"):
        run({ROUTED: [Run(0, [0], "gpu0"), Run(0, [1], "cpu0", late=True)]}, exact=True)


def test_a_victim_that_is_leaving_already_is_refused() -> None:
    # The copy at 4 bits is in use, and its 250 bytes and the 500 that are free are not enough for one at 16 bits.
    script = {ROUTED: [Fetch(0, [0], "gpu0"), Run(0, [0], "gpu0"), Run(0, [1], "gpu0", bits=4)]}
    copies, pools = (
        [Copy(0, [1, 2], "gpu0", bits=4), Copy(1, [0, 1, 2, 3], "gpu0", "b")],
        [Pool("gpu0", "cache", 1000), Pool("gpu0", "b", 4000)],
    )
    with pytest.raises(PolicyError) as error:
        run(script, copies=copies, pools=pools, evict=[(0, 1, 4)] * 2)
    says = "evict(L0/E0, gpu0) named L0/E1: it is leaving already; name each victim once, or return None to wait"
    assert says in str(error.value)
