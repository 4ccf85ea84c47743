"""An action about no experts or no rows changes nothing.

Timelines are exact: literal ns, drawn by hand next to the test, a column is 20 ns unless a scale is given.
"""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from moesim.policy import Action, Drop, Fetch, Move, Routed, Run, Skip
from tests.engine.engine_kit import ALL, ONE, TWO, Script, assert_same, play, workload

EMPTY = {
    "run on the CPU": Run(0, [], "cpu0"),
    "run on the GPU": Run(0, [], "gpu0"),
    "run of no rows": Run(0, [0], "cpu0", []),
    "run of a later layer": Run(1, (), "cpu0", [0], inputs_from=0),
    "run of NumPy's nothing": Run(0, np.array([], dtype=np.int64), "cpu0", np.array([], dtype=np.int64)),
    "run elsewhere": Run(7, [], "tpu"),
    "fetch": Fetch(1, [], "gpu0"),
    "fetch from nowhere": Fetch(0, [], "gpu9", pool="other", source="disk"),
    "drop": Drop(0, (), "gpu0"),
    "drop on the backing device": Drop(0, [], "cpu0"),
    "move": Move(0, [], "gpu0", "cache"),
    "move elsewhere": Move(0, [], "gpu0", "other"),
    "skip": Skip(0, []),
    "skip of no rows": Skip(0, [0], []),
    "skip of a later layer": Skip(1, []),
}


def test_every_kind_of_action_about_experts_is_tried_empty() -> None:
    tried = {type(action) for action in EMPTY.values()}
    assert tried == {kind for kind in get_args(Action) if "experts" in kind._fields}


@pytest.mark.parametrize("where", ["before", "after", "alone"])
@pytest.mark.parametrize("decision_ns", [0, 30])
@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_action_is_ignored(name: str, decision_ns: int, where: str) -> None:
    # One expert of each layer on each device: groups, crossings and copies are what an empty action could disturb.
    def split(event: Routed, view: Any) -> list[Any]:
        first, *rest = event.active
        return [Fetch(event.layer, rest, "gpu0"), Run(event.layer, rest, "gpu0"), Run(event.layer, [first], "cpu0")]

    def script(extra: tuple[Any, ...]) -> Script:
        def routed(event: Routed, view: Any) -> list[Any]:
            real = split(event, view)
            return [*extra, *real] if where == "before" else [*real, *extra] if where == "after" else real

        moments = [("StepBegin", 0), ("LayerBegin", 0, 0), ("LayerEnd", 0, 0), ("LayerBegin", 0, 1), ("StepEnd", 0)]
        moments += [("Fetched", 0, 1, "gpu0"), ("Ran", 0, 0, 0, "cpu0")]
        on = dict.fromkeys(moments, extra) if where == "alone" else {}
        return Script(on, copies=ALL[1:], routed=routed)

    for work in (ONE, TWO, workload([[[[0, 1], [2, 3]]], [[[1, 2], [2, 3]]]], micro_batches=2)):
        without = play(script(()), work, decision_ns=decision_ns)
        assert_same(play(script((EMPTY[name],)), work, decision_ns=decision_ns), without)
