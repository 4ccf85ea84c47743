"""Native twins of the algorithms: the same answers as their references, and which of the two a run calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from moesim.policies.base import twin
from moesim.policies.composed import Composed
from moesim.policies.parts.assignment import greedy_assignment, layer_costs
from moesim.policies.systems.prescope import PreScope
from moesim.policy import View
from tests.policies.golden_kit import CASES, run_case
from tests.policies.twins_kit import BUILT, MAKERS, OF_A_VIEW, compare, compare_on

built = pytest.mark.skipif(not BUILT, reason="the native engine is not built")


@built
@pytest.mark.parametrize("reference", MAKERS, ids=lambda reference: reference.__name__)
def test_a_twin_answers_as_its_reference(reference: Callable[..., Any]):
    found = compare(reference, 1000, seed=0)
    assert found["answers"] > 500
    assert found["own"] > 350
    assert found["errors"] > 10


@built
def test_every_twin_is_compared():
    algorithms = import_module("moesim.engine.native._native").algorithms
    assert {name for name in dir(algorithms) if not name.startswith("_")} == {
        reference.__name__ for reference in (*MAKERS, *OF_A_VIEW)
    }


@built
def test_twins_that_ask_a_view_answer_as_their_references_at_every_moment_of_a_run(monkeypatch: pytest.MonkeyPatch):
    rng, found = np.random.default_rng(0), Counter[bool]()
    decide = PreScope.decide

    def compared(self: PreScope, event: Any, view: View) -> Any:
        found[compare_on(view, rng)] += 1
        return decide(self, event, view)

    monkeypatch.setattr(PreScope, "decide", compared)
    run_case(CASES["prescope, chunks"], "native")
    assert found.total() > 500
    assert set(found) == {True, False}


@built
def test_a_run_on_simpy_calls_no_twin(monkeypatch: pytest.MonkeyPatch):
    algorithms = import_module("moesim.engine.native._native").algorithms
    compiled = algorithms.cross_layer_plan
    called = []

    def counted(*given: Any) -> Any:
        called.append(given)
        return compiled(*given)

    monkeypatch.setattr(algorithms, "cross_layer_plan", counted)
    case = CASES["prescope, chunks"]
    run_case(case, "simpy")
    assert not called
    monkeypatch.setattr(Composed, "native_parts", lambda self: None)  # so that its parts decide in Python
    run_case(case, "native")
    assert called


def test_without_a_twin_the_reference_is_called():
    class View:
        """Brings twins of other functions."""

        class algorithms:
            layer_costs = max

    view: Any = View
    assert twin(greedy_assignment, view) is greedy_assignment
    assert twin(layer_costs, view) is max
    view = object()
    assert twin(layer_costs, view) is layer_costs
