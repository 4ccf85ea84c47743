"""Numbers used by the costs of a result, and curves that fit no part of the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from moesim.hardware.types import LABELS, CostCurve, Device, HardwareProfile, weakest
from moesim.model import ModelSpec
from moesim.model.spec import FIELDS

_COMPOSED = ("roofline", "linear in rows")
"""Forms of a time that no curve holds: it is computed from several numbers, so that its label is `derived` at best."""


class Ledger:
    """Which numbers of a profile a cost model has used, and for what."""

    def __init__(self, hardware: HardwareProfile) -> None:
        self._hardware = hardware
        self._used: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._of = ""  # what a cost's name begins with

    def of(self, what: str) -> Ledger:
        """Return this ledger for costs of something else, such as experts of fewer bits."""
        other = Ledger(self._hardware)
        other._used, other._of = self._used, f"{what}: "
        return other

    def note(self, cost: str, form: str, *keys: str) -> None:
        """Note the numbers of a cost by dotted keys; absent ones are defaults of 0 or 1."""
        self._used[self._of + cost] = (form, tuple(key for key in keys if key in self._hardware.numbers))

    def add(self, cost: str, form: str, *keys: str) -> None:
        before = self._used.get(self._of + cost, (form, ()))[1]
        self.note(cost, form, *dict.fromkeys((*before, *keys)))

    def intervals(self) -> dict[str, tuple[float, float]]:
        used = dict.fromkeys(key for _, keys in self._used.values() for key in keys)
        found = {key: self._hardware.numbers[key].interval for key in used}
        return {key: interval for key, interval in found.items() if interval is not None}

    def _labels_of(self, form: str, keys: tuple[str, ...]) -> list[str]:
        labels = [self._hardware.numbers[key].source for key in keys]
        labels += ["derived"] if form in _COMPOSED else []
        return labels + (["extrapolated"] if "extrapolated" in form else [])

    def labels(self, activities: Collection[str] | None = None) -> tuple[str, ...]:
        """Distinct source labels, strongest first, those of contention included."""
        # Without `activities` every pair counts, that of a side lane once a prediction was costed
        # on its device.
        found = {label for form, keys in self._used.values() for label in self._labels_of(form, keys)}
        found |= {pair.source for pair in self._hardware.contention if self._may_act({pair.a, pair.b}, activities)}
        return tuple(sorted(found, key=LABELS.index))

    def _may_act(self, pair: set[str], activities: Collection[str] | None) -> bool:
        if activities is not None:
            return pair.issubset(activities)
        predicts = {f"{cost.rpartition('@')[2]}.side" for cost in self._used if cost.startswith("predict")}
        return all(end in predicts for end in pair if end.endswith(".side"))

    def provenance(self) -> dict[str, dict[str, Any]]:
        told = {}
        for cost, (form, keys) in sorted(self._used.items()):
            numbers = {key: self._hardware.numbers[key] for key in keys}
            told[cost] = {
                "form": form,
                "source": weakest(self._labels_of(form, keys)),
                "ref": " | ".join(dict.fromkeys(number.ref for number in numbers.values())),
                "numbers": {k: {"value": n.value, "source": n.source, "ref": n.ref} for k, n in numbers.items()},
            }
        return told


NO_CURVE = "no curve for "
"""How the note begins that results carry where a device's curves are of something else, and a roofline stands in for them."""

_EXPERTS_ONLY = frozenset(
    ("n_layers", "top_k", "expert_intermediate", "expert_bits", "expert_bias", "expert_bytes_by_layer", "low_bits",
     "n_dense_layers", "tie_embeddings", "act_bits", "units_per_expert")
)  # fmt: skip
"""Fields of a model that the time of no part of a layer but its routed experts depends on."""


def expert_curves(model: ModelSpec, device: Device) -> list[CostCurve]:
    """Choose the curves of the model's experts; none for mixed precisions or single matrices."""
    if model.expert_bytes_by_layer is not None or model.units_per_expert > 1:
        return []
    shape = (model.hidden, model.expert_intermediate, float(model.expert_bits))
    return [curve for curve in device.experts if curve.shape == shape]


def part_curves(model: ModelSpec, device: Device, part: str) -> list[CostCurve]:
    """Choose the curves of a part; none if a field that it may depend on was changed."""
    if _changed(model, (part,)):
        return []
    return [curve for curve in device.parts if curve.part == part and curve.model == model.name]


def _changed(model: ModelSpec, parts: Iterable[str]) -> list[str]:
    """List changes on which parts may depend; on `n_experts` only the dense part: its router."""
    fields = {*FIELDS} - _EXPERTS_ONLY - (set() if "dense" in parts else {"n_experts"})
    return [label for label in model.labels if label.partition("=")[0] in fields]


class Unfitting:
    """Devices whose curves a run did not use, because they are of other shapes, bits or models."""

    def __init__(self, model: ModelSpec) -> None:
        self._model = model
        self._experts: dict[str, Device] = {}
        self._parts: dict[str, tuple[Device, set[str]]] = {}

    def expert(self, device: Device) -> None:
        if device.experts:
            self._experts[device.name] = device

    def part(self, device: Device, part: str) -> None:
        if any(curve.part == part for curve in device.parts):
            self._parts.setdefault(device.name, (device, set()))[1].add(part)

    def notes(self, machine: str) -> list[str]:
        """Write a line for each device and kind of curve; no commas: they divide a result's notes."""
        model, said = self._model, []
        mixed = model.expert_bytes_by_layer is not None
        wanted = _shape(model.hidden, model.expert_intermediate, "mixed" if mixed else f"{model.expert_bits:g}")
        wanted = f"single matrices of {wanted}" if model.units_per_expert > 1 else f"experts of {wanted}"
        for name, device in sorted(self._experts.items()):
            there = dict.fromkeys(_shape(h, i, f"{bits:g}") for h, i, bits in (c.shape for c in device.experts if c.shape))
            said.append(_note(wanted, f"{name} of {machine}", there))
        for name, (device, parts) in sorted(self._parts.items()):
            whose = " ".join((model.name, *(f"with {label}" for label in _changed(model, parts))))
            there = dict.fromkeys(curve.model for curve in device.parts if curve.part in parts)
            said.append(_note(f"{' + '.join(sorted(parts))} of {whose}", f"{name} of {machine}", there))
        return said


def _shape(hidden: int, intermediate: int, bits: str) -> str:
    return f"{hidden}x{intermediate} at {bits} bits"


def _note(what: str, where: str, there: dict[str, None]) -> str:
    return f"{NO_CURVE}{what} on {where} (there: {'; '.join(there)}): roofline instead".replace(", ", " ")
