"""How the time of any part on a device is found: a curve of the profile, or a roofline."""

from __future__ import annotations

from moesim.errors import HardwareError
from moesim.hardware.costs.curves import covers, curve_ns, nearest, range_text
from moesim.hardware.costs.fitting import Unfitting, part_curves
from moesim.hardware.costs.links import LinkCosts
from moesim.hardware.costs.operations import operations
from moesim.hardware.costs.parts import Roofline, within_a_day
from moesim.hardware.types import CostCurve, Device


class PartCosts(LinkCosts):
    """Curves and rooflines, remembered and noted; see `moesim.hardware.costs.CostModel`, which is the whole of it."""

    def _prepare(self) -> None:
        super()._prepare()
        self._parts: dict[tuple[str, str, int], int] = {}
        self._rooflines: dict[tuple[str, str], Roofline] = {}
        self._unfitting = Unfitting(self.model)

    def _roofline(self, device: Device, part: str) -> Roofline:
        key = (device.name, part)
        if key not in self._rooflines:
            self._note_rates(device, part, part)
            chain = device.operation_us * self._operations(device, part) if device.operations else None
            self._rooflines[key] = Roofline(device, device.launches.get(part, 1), self._place(device, part), chain)
        return self._rooflines[key]

    def _note_rates(self, device: Device, cost: str, *parts: str) -> None:
        """Note the numbers of a roofline of some parts together; refuse that of a disk."""
        if device.role == "storage":
            raise HardwareError(
                f"{self.hardware.path}: {device.name} is a disk and computes nothing (asked for its {cost}); choose a policy "
                "that runs all experts where the dense part runs"
            )
        names = ("memory_bytes_per_s", "flops", "launch_us", *(f"launches.{part}" for part in parts), "operation_us")
        self._ledger.note(f"{cost} @{device.name}", "roofline", *(f"devices.{device.name}.{name}" for name in names))

    def _operations(self, device: Device, part: str) -> int:
        """Count the operations of a part by the engine of a device; an expert alone has none, all of a layer have "experts"."""
        return operations(device.operations, device.kind, self.model).get(part, int(part == "predict"))

    def _place(self, device: Device, part: str) -> str:
        return f"{self.hardware.path}: devices.{device.name} ({part} of {self.model.name})"

    def _part_curves(self, device: str, part: str) -> list[CostCurve]:
        found = self.hardware.devices[device]
        curves = part_curves(self.model, found, part)
        if not curves:
            self._unfitting.part(found, part)
        return curves

    def _part_ns(self, device: str, part: str, n_rows: int, n_bytes: int, operations: int) -> int:
        key = (part, device, n_rows)
        ns = self._parts.get(key)
        if ns is None:
            found = self.hardware.devices[device]
            if n_rows == 0:
                ns = 0
            elif curves := self._part_curves(device, part):
                ns = self._from_curves(found, part, curves, n_rows, f"{part} curve for {self.model.name}")
            else:
                ns = self._roofline(found, part).ns(n_bytes, operations)
            self._parts[key] = ns
        return ns

    def _from_curves(self, device: Device, part: str, curves: list[CostCurve], n_rows: int, what: str) -> int:
        if n_rows == 0:
            return 0
        cost = f"{part} @{device.name}"
        curve = next((curve for curve in curves if covers(curve, n_rows)), None)
        if curve is None:
            if not self.extrapolate:
                chunks = ", split prompts with workload.prefill_chunk," if n_rows > max(curve.last for curve in curves) else ""
                raise HardwareError(
                    f"{self.hardware.path} has no {what} on {device.name} at {n_rows} tokens "
                    f"(measured {range_text(curves)}); measure it{chunks} or set extrapolate: true"
                )
            curve = nearest(curves, n_rows)
            cost += " outside its range"
        names = ("base_us", "per_token_us", "flat_us", "knee_tokens", "points")
        form = curve.form if covers(curve, n_rows) else f"{curve.form}, extrapolated"
        self._ledger.note(cost, form, *(f"{curve.key}.{name}" for name in names))
        return within_a_day(curve_ns(curve, n_rows), f"{self.hardware.path}: {curve.key} ({what} at {n_rows} rows)")
