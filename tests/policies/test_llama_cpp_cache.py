"""llama.cpp's own expert cache: its worked examples, and who computes which calls."""

from __future__ import annotations

import pytest

from moesim.policies.registry import make_policy
from moesim.policies.systems.llama_cpp_cache import CLASSES, ClassBank
from tests.engine.engine_kit import play, tiny_model, workload
from tests.policies.caches_kit import FAST, Step, happened, run


def test_least_recently_used_over_all_layers() -> None:
    # 4 slots. Layer 0: 3, 1; layer 1: 2, 5; then layer 0: 1 is there, 4 takes the slot of 3; layer 1: 5 there, 0 that of 2.
    records = run("llama-cpp-cache", [[[3, 1], [2, 5]], [[1, 4], [5, 0]]], 4, layers=2)
    assert happened(records, 2) == [
        Step([[1, 3], [2, 5]], [(0, 1), (0, 3), (1, 2), (1, 5)], []),
        Step([[1, 4], [0, 5]], [(0, 4), (1, 0)], [(0, 3), (1, 2)]),
    ]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 2**CLASSES - 1, 2**CLASSES, 10**12])
def test_classes_are_by_powers_of_two_of_what_was_used(rows: int) -> None:
    bank = ClassBank(4, 1, 2)
    bank.used(0, [1], [0, rows], 1)
    bank.enter((0, 1), 0)
    assert bank._class[0, 1] == min(rows.bit_length() - 1, CLASSES - 1)
    assert [list(members) for members in bank._members] == [[(0, 1)] * (at == bank._class[0, 1]) for at in range(CLASSES)]


def test_class_lru_spares_what_has_been_used_often() -> None:
    # One layer, two slots, one expert at a time; the score of 7 becomes 3.968, class 1, at time 3.
    bank = ClassBank(9, 1, 16)

    def call(expert: int, n_tokens: int) -> None:
        bank.used(0, [expert], [0] * expert + [1], n_tokens)
        if (0, expert) in bank.slot:
            bank.touch((0, expert))
        else:
            bank.enter((0, expert), expert)

    def victim(*experts: int) -> tuple[int, int] | None:
        return bank.victim(lambda units: (unit for unit in units if unit[1] in experts))

    for _ in range(4):
        call(7, 1)
    call(1, 1)
    call(2, 8)  # at 12: 8/1 of 1 against 9/2 of 7, which has been used longer ago
    assert victim(7, 1) == (0, 1)
    assert bank.leave((0, 1)) == 1
    call(3, 8)  # at 20: 8/1 of 2 against 17/2
    assert victim(7, 2) == victim(7, 1, 2) == (0, 7)
    assert victim() is None


def test_no_upload_goes_on_while_the_gpu_computes() -> None:
    # The token crosses in 20. Two copies of 10 ns each end at 140; both experts then take 100 each.
    records = run("llama-cpp-cache", [[0, 1]], 4)
    assert [(t.start, t.end) for t in records.transfers] == [(120, 130), (130, 140)]
    assert [(t.start, t.end, t.device) for t in records.tasks if t.expert >= 0] == [(140, 240, "gpu0"), (240, 340, "gpu0")]


@pytest.mark.parametrize(
    ("rows", "slots", "device", "cached"),
    [
        (4, 8, "gpu0", True),  # 4 x 2 <= 8
        (5, 8, "cpu0", False),  # 5 x 2 > 8 slots, and too few rows for op-offload
        (32, 9, "gpu0", True),  # all 9 experts have a slot
        (33, 9, "gpu0", False),  # more than 32 tokens: op-offload
        (32, 8, "gpu0", False),
    ],
)
def test_which_calls_the_cache_serves(rows: int, slots: int, device: str, cached: bool) -> None:
    model = tiny_model(n_layers=1, n_experts=9)
    work = workload([[[[0, 1]]] * rows + [[[0, 1]]]], prompt=rows, n_experts=9)
    records = play(make_policy("llama-cpp-cache"), work, FAST, model=model, slots={"gpu0": slots})
    assert {t.device for t in records.tasks if t.expert >= 0 and t.step == 0} == {device}
    again = [t for t in records.transfers if t.expert >= 0 and t.submitted >= records.steps[1].begin]
    assert len(again) == (0 if cached else 2), "what the prompt has brought stays only in the cache"
