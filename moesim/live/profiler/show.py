"""Hardware profiles for a reader: a page with each number's source, two side by side."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Final, NamedTuple

from moesim.core.table import Format, render, render_records
from moesim.core.units import format_bytes, parse_bytes
from moesim.errors import HardwareError
from moesim.hardware import LABELS, HardwareProfile, weakest
from moesim.hardware.costs import CostModel
from moesim.hardware.costs.curves import covers, curve_ns, points_ns
from moesim.hardware.types import TRANSFERS, CostCurve, Device, ExpertCost, Link, Number, Transfer
from moesim.metrics.naming import model_label
from moesim.model import ModelSpec, builtin_models

MODELS: Final = ("mixtral-8x7b", "deepseek-v2-lite", "qwen3-30b-a3b")
"""Models whose experts are shown on their way over links, unless others are named."""

_ROWS: Final = (1, 16, 256)
_ROW_HEADS: Final = [f"{n} row{'s' if n > 1 else ''}, us" for n in _ROWS]
_SIZES: Final = {"64 KB": 64_000, "16 MB": 16_000_000}
_WEAK: Final = 4  # keys of the weakest numbers that are named
_FORM_KEYS: Final = ("base_us", "per_token_us", "flat_us", "knee_tokens", "points", "first_extra_us")
_TRANSFER_KEYS: Final = ("latency_us", "bytes_per_s", "points")
_UNITS: Final = (("bytes_per_s", "bytes/s"), ("_bytes", "bytes"), ("flops", "operations/s"), ("_us", "us"), ("_w", "W"))


def facts(profile: HardwareProfile, models: Sequence[ModelSpec] = ()) -> dict[str, Any]:
    """Collect a profile's numbers and sources as plain values; us, None outside a range."""
    sent = models or [builtin_models()[name] for name in MODELS]
    counts = Counter(number.source for number in profile.numbers.values())
    label = weakest(counts)
    return {
        "name": profile.name, "path": profile.path, "description": profile.description,
        "corrections": list(profile.corrections), "machine": dict(profile.machine),
        "compute": profile.compute, "backing": list(profile.backing), "platform_w": profile.platform_w,
        "host": _host(profile), "devices": [_device(profile, device) for device in profile.devices.values()],
        "curves": [row for device in profile.devices.values() for row in _curves(profile, device)],
        "experts": [row for model in models for row in _experts(profile, model)],
        "links": [row for link in profile.links for row in _transfers(profile, link, sent)],
        "contention": list(_contention(profile)),
        "labels": {name: counts[name] for name in LABELS if name in counts},
        "weakest": {"label": label, "keys": [key for key, number in profile.numbers.items() if number.source == label]},
        "numbers": {key: {"value": n.value, "source": n.source, "ref": n.ref} for key, n in profile.numbers.items()},
    }  # fmt: skip


def _told(profile: HardwareProfile, keys: Sequence[str]) -> dict[str, Any]:
    """Return the weakest label of numbers, a single one's interval, measured ones' words."""
    found = [profile.numbers[key] for key in keys if key in profile.numbers]
    measured = dict.fromkeys(_measured(number) for number in found if number.source == "measured")
    interval = found[0].interval if len(found) == 1 else None
    return {"source": weakest(number.source for number in found), "measured": " | ".join(measured), "interval": interval}


def _measured(number: Number) -> str:
    date = re.search(r"\d{4}-\d{2}(-\d{2})?", number.ref)
    *_, spread, repeats = number.ref.split("; ")  # the last that the format writes
    return ", ".join([*([date[0]] if date else []), repeats, spread])


def unit_of(key: str) -> str:
    """Return the unit of a number by its key."""
    return next((unit for end, unit in _UNITS if key.endswith(end)), "")


def _row(profile: HardwareProfile, quantity: str, value: Any, unit: str, keys: Sequence[str]) -> dict[str, Any]:
    return {"quantity": quantity, "value": value, "unit": unit} | _told(profile, keys)


def _device(profile: HardwareProfile, device: Device) -> dict[str, Any]:
    prefix = f"devices.{device.name}."
    scalar = {key.removeprefix(prefix): number for key, number in profile.numbers.items() if key.startswith(prefix)}
    shown = {name: name for name in scalar if "." not in name}
    shown |= {name: name.replace("expert_cost.", "expert ") for name in scalar if name.startswith("expert_cost.")}
    for i, (size, _) in enumerate(device.expert_cost.read_rates if device.expert_cost else ()):
        shown[f"expert_cost.read_rates.{i}.bytes_per_s"] = f"experts of {format_bytes(size)} read at"
    rows = [_row(profile, words, scalar[name].value, unit_of(name), [prefix + name]) for name, words in shown.items()]
    if device.operations:
        counted = f"counted from the model, {device.operations}"
        rows.append(_row(profile, "operations", counted, "", [f"{prefix}operation_us"]))
    launches = [name for name in scalar if name.startswith("launches.")]
    for label in dict.fromkeys(scalar[name].source for name in launches):
        some = [name for name in launches if scalar[name].source == label]
        value = ", ".join(f"{name.removeprefix('launches.')} {scalar[name].value}" for name in some)
        rows.append(_row(profile, "launches", value, "", [prefix + name for name in some]))
    return {
        "device": device.name, "kind": device.kind, "role": device.role, "host": device.host, "cores": list(device.cores),
        "numbers": rows,
    }  # fmt: skip


def _host(profile: HardwareProfile) -> list[dict[str, Any]]:
    words = {"host_expert_us": ("submission of an expert", "us"), "host_shared": ("thread computes the host's experts too", "")}
    known = [(key, *said) for key, said in words.items() if key in profile.numbers]
    return [_row(profile, what, profile.numbers[key].value, unit, [key]) for key, what, unit in known]


def _curves(profile: HardwareProfile, device: Device) -> Iterator[dict[str, Any]]:
    named: list[tuple[str, CostCurve]] = []
    for curve in device.experts:
        hidden, intermediate, bits = curve.shape or (0, 0, 0.0)
        named.append((f"expert {hidden}x{intermediate}, {bits:g} bits", curve))
    named += [(f"{curve.part} of {curve.model}", curve) for curve in device.parts]
    named += [(f"prediction {name}", curve) for name, curve in device.predict.items()]
    for what, curve in named:
        times = {f"us_at_{n}": curve_ns(curve, n) / 1000 if covers(curve, n) else None for n in _ROWS}
        keys = [f"{curve.key}.{name}" for name in _FORM_KEYS]
        row = {"device": device.name, "curve": what, "form": curve.form, "range": [curve.first, curve.last], **times}
        yield row | _told(profile, keys)


def _experts(profile: HardwareProfile, model: ModelSpec) -> Iterator[dict[str, Any]]:
    for device in profile.devices.values():
        if device.role != "storage":
            costs = CostModel(model, profile)
            times = {f"us_at_{n}": _expert_us(costs, device.name, n) for n in _ROWS}
            yield {"device": device.name, "expert": model_label(model), **times, "source": costs.label(())}


def _expert_us(costs: CostModel, device: str, n_rows: int) -> float | None:
    try:
        return costs.expert_ns(device, n_rows) / 1000
    except HardwareError:
        return None


def _transfers(profile: HardwareProfile, link: Link, models: Sequence[ModelSpec]) -> Iterator[dict[str, Any]]:
    sizes = {**_SIZES, **{f"{model_label(model)} expert": model.expert_bytes(0) for model in models}}
    curves = {curve.key: curve for curve in link.curves.values()}  # "any" is of every kind
    for curve in [*curves.values(), *([link.activation] if link.activation else [])]:
        times = {head: _copy_us(curve, n_bytes) for head, n_bytes in sizes.items()}
        rate = float(curve.bytes_per_s) or float(curve.points[-1][0] / curve.points[-1][1] * 10**6)
        row = {"link": link.name, "transfer": curve.key.rpartition(".")[2], "us": times, "bytes_per_s": rate}
        yield row | _told(profile, [f"{curve.key}.{name}" for name in _TRANSFER_KEYS])


def _copy_us(curve: Transfer, n_bytes: int) -> float | None:
    if not curve.points:
        return float(curve.latency_us + Fraction(n_bytes * 10**6, curve.bytes_per_s))
    return points_ns(curve.points, n_bytes) / 1000 if curve.points[0][0] <= n_bytes <= curve.points[-1][0] else None


def _contention(profile: HardwareProfile) -> Iterator[dict[str, Any]]:
    for index, pair in enumerate(profile.contention):
        for one, other, ppm, key in ((pair.a, pair.b, pair.a_rate_ppm, "a_rate"), (pair.b, pair.a, pair.b_rate_ppm, "b_rate")):
            yield {"activity": one, "beside": other, "rate": ppm / 1e6} | _told(profile, [f"contention.{index}.{key}"])


def page(profile: HardwareProfile, models: Sequence[ModelSpec] = ()) -> str:
    """Write what `facts` collects for a terminal, equal rows once."""
    found = facts(profile, models)
    lines = [f"{found['name']}: {found['description']}"]
    lines += [f"  {key}: {value}" for key, value in found["machine"].items()]
    lines += [f"  departs from what was printed: {text}" for text in found["corrections"]]
    lines += [f"dense parts on {found['compute']}; all experts on {', '.join(found['backing'])}", ""]
    for names, device in _alike(found["devices"], "device"):
        cores = [f"cores {', '.join(map(str, device['cores']))}"] if device["cores"] else []
        heads = [f"{names} ({', '.join([device['kind'], device['role'], *cores])})", "value", "source"]
        rows = [[row["quantity"], value_text(row["value"], row["unit"]), _source(row, row["unit"])] for row in device["numbers"]]
        lines.append(render(heads, rows, Format.TABLE, ["value"]))
    lines += [f"{row['quantity']}: {value_text(row['value'], row['unit'])}, {_source(row, row['unit'])}" for row in found["host"]]
    if found["platform_w"] is not None:
        lines += [f"the rest of the machine: {found['platform_w']:g} W, {_source(_told(profile, ['platform_w']))}", ""]
    if found["curves"]:
        heads = ["curves", "on", "form", "rows", *_ROW_HEADS, "source"]
        rows = [
            [
                row["curve"], names, row["form"], "{}..{}".format(*row["range"]),
                *(_us(row[f"us_at_{n}"]) for n in _ROWS), _source(row),
            ]
            for names, row in _alike(found["curves"], "device")
        ]  # fmt: skip
        lines.append(render(heads, rows, Format.TABLE, heads[4:7]))
    if found["experts"]:
        heads = ["an expert of", "on", *_ROW_HEADS, "weakest source"]
        rows = [
            [row["expert"], names, *(_us(row[f"us_at_{n}"]) for n in _ROWS), row["source"]]
            for names, row in _alike(found["experts"], "device")
        ]
        lines.append(render(heads, rows, Format.TABLE, _ROW_HEADS))
    if found["links"]:
        sizes = list(found["links"][0]["us"])
        heads = ["links", "transfer", *(f"{size}, us" for size in sizes), "GB/s", "source"]
        rows = [
            [names, row["transfer"], *(_us(row["us"][size]) for size in sizes), f"{row['bytes_per_s'] / 1e9:.3g}", _source(row)]
            for names, row in _alike(found["links"], "link")
        ]
        lines.append(render(heads, rows, Format.TABLE, heads[2:-1]))
    if found["contention"]:
        rows = [[row["activity"], row["beside"], f"{100 * row['rate']:.3g} %", _source(row)] for row in found["contention"]]
        lines.append(render(["contention", "beside", "speed kept", "source"], rows, Format.TABLE, ["speed kept"]))
    return "\n".join([*lines, _last_line(found)]) + "\n"


def _last_line(found: Mapping[str, Any]) -> str:
    keys = found["weakest"]["keys"]
    counts = ", ".join(f"{count} {label}" for label, count in found["labels"].items())
    named = ", ".join(keys[:_WEAK]) + (f" and {len(keys) - _WEAK} more" if len(keys) > _WEAK else "")
    return f"{len(found['numbers'])} numbers: {counts}; the weakest are {found['weakest']['label']}: {named}"


def _alike(rows: Sequence[Mapping[str, Any]], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Put together what differs in its name only."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(repr({key: value for key, value in row.items() if key not in (name, "host")}), []).append(row)
    for group in groups.values():
        names = [str(row[name]) for row in group]
        yield ", ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} like it", group[0]


def _source(row: Mapping[str, Any], unit: str = "") -> str:
    interval = " to ".join(value_text(end, unit) for end in row["interval"]) if row["interval"] else ""
    words = ", ".join(filter(None, (interval, row["measured"])))
    return f"{row['source']} ({words})" if words else str(row["source"])


def value_text(value: Any, unit: str) -> str:
    """Write a number for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit == "bytes":
        return format_bytes(parse_bytes(value) if isinstance(value, str) else value)
    for scale, large in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if unit.endswith("/s") and value >= scale:
            return f"{value / scale:.4g} {large}{unit.replace('bytes', 'B').replace('operations', ' operations')}"
    return f"{value:g} {unit}".strip() if isinstance(value, (int, float)) else str(value)


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_ROWS_COMPARED: Final = (1, 4, 16, 64)
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
        return None if not self.a or self.b is None else self.b / self.a


Answer = tuple[float, str] | None  # a value and its weakest source label; None where a machine lacks it


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

    def host_cost(self) -> ExpertCost | None:
        name = self.device["host"]
        return None if name is None else self.profile.devices[name].expert_cost

    def cost(self, ask: Callable[[CostModel], int], transfer: str = "pinned") -> Answer:
        costs = CostModel(self.model, self.profile, transfer=transfer)
        try:
            return ask(costs) / 1000, costs.label(())
        except HardwareError:
            return None

    def path(self, src: str, dst: str) -> tuple[Link, ...] | None:
        ends = self.device[src], self.device[dst]
        if ends[0] is None or ends[1] is None:
            return None
        try:
            return self.profile.path_between(ends[0], ends[1])
        except HardwareError:
            return None

    def has_kinds(self, src: str, dst: str) -> bool:
        return any(len({curve.key for curve in link.curves.values()}) > 1 for link in self.path(src, dst) or ())

    def activity(self, words: str) -> str | None:
        """Translate roles in an activity's name into this machine's devices; None if one is missing."""
        ends = [end.split(".") for end in words.split("->")]
        named = [[self.device[role], *rest] for role, *rest in ends]
        return None if any(name is None for name, *_ in named) else "->".join(".".join(map(str, name)) for name in named)

    def roles(self, activity: str) -> str | None:
        """Translate devices in an activity's name into roles; None if one has another device."""
        by_name = {name: role for role, name in self.device.items()}
        ends = [end.split(".") for end in activity.split("->")]
        named = [[by_name.get(name), *rest] for name, *rest in ends]
        return None if any(role is None for role, *_ in named) else "->".join(".".join(map(str, name)) for name in named)


Question = tuple[str, str, Callable[[_Side], Answer]]


def _questions(sides: Sequence[_Side]) -> Iterator[Question]:
    model = sides[0].model
    for role in ("accelerator", "host"):
        for n_rows in _ROWS_COMPARED:
            yield f"expert, {n_rows} row{'s' if n_rows > 1 else ''}, {role}", "us", partial(_expert, role=role, n_rows=n_rows)
    costs = [side.host_cost() for side in sides]
    for size in sorted({size for cost in costs if cost is not None for size, _ in cost.read_rates}):
        yield f"reading of an expert of {format_bytes(size)}, host", "us", partial(_reading, n_bytes=size)
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
                    yield f"{named[0]} with {named[1]}", "share", partial(_kept, activity=named[0], beside=named[1])


def _expert(side: _Side, role: str, n_rows: int) -> Answer:
    device = side.device[role]
    return None if device is None else side.cost(lambda costs: costs.expert_ns(device, n_rows))


def _reading(side: _Side, n_bytes: int) -> Answer:
    cost, prefix = side.host_cost(), f"devices.{side.device['host']}."
    if cost is None:
        return None
    points = [f"expert_cost.read_rates.{i}.bytes_per_s" for i in (cost.points_of(n_bytes) if cost.read_rates else ())]
    keys = [prefix + key for key in points or ("expert_cost.read_bytes_per_s", "memory_bytes_per_s")]
    labels = [side.profile.numbers[key].source for key in keys if key in side.profile.numbers]
    outside = points and not cost.read_rates[0][0] <= n_bytes <= cost.read_rates[-1][0]
    return float(cost.reading_s(n_bytes) * 10**6), weakest(labels[: len(points) or 1] + (["extrapolated"] if outside else []))


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


def table(rows: Sequence[Row], a: str, b: str, form: Format = Format.TABLE) -> str:
    """Write a comparison."""
    if form.for_programs:
        records: list[dict[str, Any]] = [{**row._asdict(), "ratio": row.ratio} for row in rows]
        return render_records(records, form)
    cells = [
        [
            f"{row.quantity}{', us' if row.unit == 'us' else ', speed kept'}", _cell(row.a, a), _cell(row.b, b),
            "" if row.ratio is None else f"{row.ratio:.3g}", row.a_source, row.b_source,
        ]
        for row in rows
    ]  # fmt: skip
    heads = ["", a, b, "B / A", f"source, {a}", f"source, {b}"]
    return render(heads, cells, form, heads[1:4])


def _cell(value: float | None, name: str) -> str:
    return f"not in {name}" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
