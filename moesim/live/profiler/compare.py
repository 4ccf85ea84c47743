"""Two machines side by side: what the same things cost on each, device for device by the role it plays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from moesim.core.table import Format, render, render_records
from moesim.errors import HardwareError
from moesim.hardware import HardwareProfile, Link
from moesim.hardware.costs import CostModel
from moesim.hardware.types import TRANSFERS
from moesim.model import ModelSpec

_ROWS: Final = (1, 4, 16, 64)
_CONTEXT: Final = 512  # tokens that the row of the dense part attends to
_ROLES: Final = ("accelerator", "host", "storage")


class Row(NamedTuple):
    """One quantity on two machines."""

    quantity: str  # in words
    unit: str  # `us`, or `share` for what an activity keeps of its speed
    # a, b: values; None where a machine lacks it
    a: float | None
    b: float | None
    # a_source, b_source: weakest source label of the numbers used; empty where there are none
    a_source: str
    b_source: str

    @property
    def ratio(self) -> float | None:
        """Give b / a; None unless both are there and a is above 0."""
        return None if not self.a or self.b is None else self.b / self.a


Answer = tuple[float, str] | None
"""A value and its weakest source label; None where a machine lacks it."""


def compare(a: HardwareProfile, b: HardwareProfile, model: ModelSpec) -> list[Row]:
    """Ask both machines what the parts of a model cost."""
    sides = _Side(a, model), _Side(b, model)
    rows = []
    for quantity, unit, ask in _questions(sides):
        answers = [ask(side) for side in sides]
        if any(answers):
            (one, one_source), (two, two_source) = (answer or (None, "") for answer in answers)
            rows.append(Row(quantity, unit, one, two, one_source, two_source))
    return rows


class _Side:
    """One of the machines, asked by roles."""

    def __init__(self, profile: HardwareProfile, model: ModelSpec) -> None:
        self.profile, self.model = profile, model
        ordered = [profile.compute, *profile.backing, *profile.devices]
        self.device = {role: next((n for n in ordered if profile.devices[n].role == role), None) for role in _ROLES}

    def cost(self, ask: Callable[[CostModel], int], transfer: str = "pinned") -> Answer:
        """Cost something in us; None where the profile cannot."""
        costs = CostModel(self.model, self.profile, transfer=transfer)
        try:
            return ask(costs) / 1000, costs.label(())
        except HardwareError:
            return None

    def path(self, src: str, dst: str) -> tuple[Link, ...] | None:
        """Find the links between the devices of two roles; None if there is no such device or no way."""
        ends = self.device[src], self.device[dst]
        if ends[0] is None or ends[1] is None:
            return None
        try:
            return self.profile.path_between(ends[0], ends[1])
        except HardwareError:
            return None

    def has_kinds(self, src: str, dst: str) -> bool:
        """Tell whether the kinds of transfer differ on the way."""
        return any(len({curve.key for curve in link.curves.values()}) > 1 for link in self.path(src, dst) or ())

    def activity(self, words: str) -> str | None:
        """Name by this machine's devices what is named by roles; None if it has none such."""
        ends = [end.split(".") for end in words.split("->")]
        named = [[self.device[role], *rest] for role, *rest in ends]
        return None if any(name is None for name, *_ in named) else "->".join(".".join(map(str, name)) for name in named)

    def roles(self, activity: str) -> str | None:
        """Name by roles what is named by devices; None if another device is the one of its role."""
        by_name = {name: role for role, name in self.device.items()}
        ends = [end.split(".") for end in activity.split("->")]
        named = [[by_name.get(name), *rest] for name, *rest in ends]
        return None if any(role is None for role, *_ in named) else "->".join(".".join(map(str, name)) for name in named)


Question = tuple[str, str, Callable[[_Side], Answer]]


def _questions(sides: Sequence[_Side]) -> Iterator[Question]:
    model = sides[0].model
    for role in ("accelerator", "host"):
        for n_rows in _ROWS:
            yield f"expert, {n_rows} row{'s' if n_rows > 1 else ''}, {role}", "us", partial(_expert, role=role, n_rows=n_rows)
    for src, dst in (("host", "accelerator"), ("storage", "accelerator"), ("accelerator", "host"), ("accelerator", "storage")):
        kinds = TRANSFERS if any(side.has_kinds(src, dst) for side in sides) else TRANSFERS[:1]
        for kind in kinds:
            words = f"copy of one expert, {kind}, {src} -> {dst}" if len(kinds) > 1 else f"copy of one expert, {src} -> {dst}"
            yield words, "us", partial(_copy, src=src, dst=dst, kind=kind)
    shared = ", shared experts" if model.shared_params else ""
    yield f"layer without routed experts (attention to {_CONTEXT} tokens, router{shared}), 1 row", "us", _dense
    for src, dst in (("accelerator", "host"), ("host", "accelerator")):
        yield f"hidden state of 1 row, {src} -> {dst}", "us", partial(_activation, src=src, dst=dst)
    seen = set()
    for side in sides:
        for pair in side.profile.contention:
            for activity, beside in ((pair.a, pair.b), (pair.b, pair.a)):
                named = side.roles(activity), side.roles(beside)
                if named[0] is not None and named[1] is not None and named not in seen:
                    seen.add(named)
                    yield f"{named[0]} beside {named[1]}", "share", partial(_kept, activity=named[0], beside=named[1])


def _expert(side: _Side, role: str, n_rows: int) -> Answer:
    device = side.device[role]
    return None if device is None else side.cost(lambda costs: costs.expert_ns(device, n_rows))


def _copy(side: _Side, src: str, dst: str, kind: str) -> Answer:
    way = side.path(src, dst)
    return side.cost(lambda costs: costs.fetch_ns(way[0].src, way[-1].dst), kind) if way else None


def _dense(side: _Side) -> Answer:
    device = side.profile.compute

    def ask(costs: CostModel) -> int:
        attention = costs.attention_ns(device, 1, 2 * _CONTEXT + 1, 1)
        return attention + costs.dense_ns(device, 1) + costs.shared_ns(device, 1)

    return side.cost(ask)


def _activation(side: _Side, src: str, dst: str) -> Answer:
    way = side.path(src, dst)
    return side.cost(lambda costs: sum(costs.activation_ns(link, 1) for link in way)) if way else None


def _kept(side: _Side, activity: str, beside: str) -> Answer:
    names = side.activity(activity), side.activity(beside)
    for index, pair in enumerate(side.profile.contention):
        for ends, ppm, key in (((pair.a, pair.b), pair.a_rate_ppm, "a_rate"), ((pair.b, pair.a), pair.b_rate_ppm, "b_rate")):
            if ends == names:
                return ppm / 1e6, side.profile.numbers[f"contention.{index}.{key}"].source
    return None


# -------------------------------------------------------------------------------------------------------------- table


def table(rows: Sequence[Row], a: str, b: str, form: Format = Format.TABLE) -> str:
    """Write a comparison."""
    if form.for_programs:
        records: list[dict[str, Any]] = [{**row._asdict(), "ratio": row.ratio} for row in rows]
        return render_records(records, form)
    cells = [
        [
            f"{row.quantity}{', us' if row.unit == 'us' else ', speed kept'}",
            _cell(row.a, a),
            _cell(row.b, b),
            "" if row.ratio is None else f"{row.ratio:.3g}",
            row.a_source,
            row.b_source,
        ]
        for row in rows
    ]
    heads = ["", a, b, "B / A", f"source, {a}", f"source, {b}"]
    return render(heads, cells, form, heads[1:4])


def _cell(value: float | None, name: str) -> str:
    return f"not in {name}" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
