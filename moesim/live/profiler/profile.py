"""A hardware profile from samples: medians as they are, with how each was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression, nnls

from moesim.core.units import format_bytes
from moesim.live.profiler.fits import medians, pair_rates
from moesim.live.profiler.plan import transfers
from moesim.live.profiler.probes import FOLLOWING, Device, Layout, Link, Tier, Wanted, all_shapes, subject_of

FEW: Final = 8
"""Rows up to which they are few: kernels for one row are used up to about here, by the engines whose source says so."""


@dataclass(frozen=True)
class Curve:
    """Measured times of one shape."""

    n_bytes: int  # of an expert
    operations: int  # of one row
    rows: NDArray[np.int64]  # shape (n,)
    us: NDArray[np.float64]  # shape (n,)


@dataclass(frozen=True)
class Line:
    """The constants of `linear`, in us and rates a second; ``many_row_flops`` may be None."""

    per_expert_us: float
    per_row_us: float
    read_bytes_per_s: float
    few_row_flops: float
    many_row_flops: float | None


def linear(curves: Sequence[Curve]) -> Line | None:
    """Fit the constants by least squares of relative errors, none of them negative."""
    few = [(c, n, us) for c in curves for n, us in zip(c.rows, c.us, strict=True) if n <= FEW]
    if not any(n == 1 for _, n, _ in few) or all(n == 1 for _, n, _ in few):
        return None
    sizes = len({c.n_bytes for c, _, _ in few}) > 1
    # Columns: 1 / read rate, 1 / few-row rate, and of several sizes what an expert and what a row takes; in us.
    matrix = np.array([[c.n_bytes * 1e6, (n - 1) * c.operations * 1e6, float(sizes), float(sizes) * (n - 1)] for c, n, _ in few])
    found = _relative(matrix, np.array([us for _, _, us in few]))
    many = _many(curves)
    slope = found[1] or (1 / many if many else 0.0)  # no slope among few rows: no slower than many
    if not found[0] or not slope:
        return None
    return Line(found[2], found[3], 1 / found[0], 1 / slope, None if many is None else max(many, 1 / slope))


def _many(curves: Sequence[Curve]) -> float | None:
    """Return the operations a second of rows beyond few: the slope of each curve there."""
    parts = [(c, c.rows > FEW) for c in curves if (c.rows > FEW).sum() > 1]
    if not parts:
        return None
    columns = len(parts) + 1
    rows, times = [], []
    for place, (curve, beyond) in enumerate(parts):
        for n, us in zip(curve.rows[beyond], curve.us[beyond], strict=True):
            line = [0.0] * columns
            line[0], line[1 + place] = n * curve.operations * 1e6, 1.0
            rows.append(line)
            times.append(us)
    slope = _relative(np.array(rows), np.array(times))[0]
    return 1 / slope if slope else None


def _relative(matrix: NDArray[np.float64], times: NDArray[np.float64]) -> list[float]:
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    found, _ = nnls(matrix / scale / times[:, None], np.ones(len(times)))
    return [float(value) for value in found / scale]


_SAME: Final = 1e-6  # of a time: rounded rates of times that differ by less could contradict each other
_FALL = 0.5  # the format takes no time of an expert below this share of an earlier one


@dataclass(frozen=True)
class Facts:
    """A profile's facts besides times."""

    # name, date: name of the first profile, and the day of the measurement
    name: str
    date: str
    machine: Mapping[str, str]  # what was measured, in words
    memory_bytes: Mapping[str, int]  # capacity of each place of the layout
    notes: Sequence[str] = ()  # what is not as might be expected


def us_of(value: float) -> float | int:
    """Round a time to nanoseconds."""
    rounded = round(float(value), 3)
    return int(rounded) if rounded.is_integer() else rounded


def monotone(times: Any) -> Any:
    """Return the nearest times that do not fall, by relative distance."""
    weights = 1 / np.maximum(times, 1e-3) ** 2
    found: Any = np.asarray(isotonic_regression(times, weights=weights).x)
    return times if (np.diff(times) >= 0).all() else found


def _spread(rows: pd.DataFrame) -> str:
    spread = 100 * rows["spread"].to_numpy(float)
    if len(rows) == 1:
        return f"interquartile range / median {spread[0]:.2g} %"
    at = int(rows["size"].iloc[int(spread.argmax())])
    unit = str(rows["unit"].iloc[0])
    return f"interquartile range / median {np.median(spread):.2g} % in the middle, at most {spread.max():.2g} % (at {at} {unit})"


_PARTS = ("attention", "context", "dense", "shared", "head", "embedding", "leading")

_ROUTER_PRODUCTS = ("gate", "residual")
"""Predictors that are one product with a router: of a state as it is, or with a vector added to it."""

_METHODS = {
    "expert": "one expert after the other, gathering its rows and adding its outputs included; weights not in the cache; medians",
    "attention": (
        "one layer's norm, attention and residual; up to 16 rows: one row of a sequence each, more: prompts of 64 rows; medians"
    ),
    "context": "one row's attention with so many tokens in the cache, less that with its own only; medians, made monotone",
    "dense": "one layer's norm, router, and its result on the host; weights not in the cache; medians",
    "shared": "all shared experts of one layer; medians",
    "head": "last norm, product with the vocabulary, likeliest token; medians",
    "embedding": "rows of the table that are not in the cache; medians",
    "leading": "one leading layer less its attention; medians",
    "predict": "one more product with a router; weights not in the cache; medians",
}


def profiles_of(samples: pd.DataFrame, layout: Layout, wanted: Sequence[Wanted], facts: Facts) -> dict[str, dict[str, Any]]:
    """Make the contents of all profiles of a measurement."""
    maker = _Profiles(samples, wanted, facts)
    return {facts.name + tier.suffix: maker.profile(tier) for tier in layout.tiers}


class _Profiles:
    """Makes profiles of the medians of a measurement, each number with its proof."""

    def __init__(self, samples: pd.DataFrame, wanted: Sequence[Wanted], facts: Facts) -> None:
        self.table = medians(samples)
        self.pairs = pair_rates(samples)
        self.wanted, self.facts = wanted, facts

    def points_at(self, kind: str, device: str, **which: Any) -> pd.DataFrame:
        rows = self.table[(self.table["kind"] == kind) & (self.table["device"] == device)]
        for column, value in which.items():
            rows = rows[rows[column].isna()] if value is None else rows[rows[column] == value]
        return rows.sort_values("size")

    def measured(self, value: Any, rows: pd.DataFrame, method: str) -> dict[str, Any]:
        return {
            "value": value, "source": "measured", "date": self.facts.date, "method": method,
            "repeats": int(rows["n"].min()), "spread": _spread(rows),
        }  # fmt: skip

    def read_off(self, value: Any, method: str) -> dict[str, Any]:
        return {
            "value": value, "source": "measured", "date": self.facts.date, "method": method, "repeats": 1, "spread": "none",
        }  # fmt: skip

    def curve(self, sizes: Any, times: Any, rows: pd.DataFrame, method: str) -> dict[str, Any]:
        us = np.maximum(np.asarray(times, dtype=float), 0)
        if (us < _FALL * np.maximum.accumulate(us)).any():
            us, method = monotone(us), f"{method}; made monotone, since times fell to less than half"
        points = [[int(n), us_of(t)] for n, t in zip(sizes, us, strict=True)]
        return {"form": "points", "range": [points[0][0], points[-1][0]], "points": self.measured(points, rows, method)}

    def transfer(self, rows: pd.DataFrame, times: Any, method: str) -> dict[str, Any]:
        rising = monotone(times)
        how = "medians" if np.array_equal(times, rising) else "medians, made monotone"
        points = [[int(n), us_of(us)] for n, us in zip(rows["size"], rising, strict=True)]
        return {"points": self.measured(points, rows, f"{method}; {how}")}

    def profile(self, tier: Tier) -> dict[str, Any]:
        words = self.facts.machine.get("processor", "a machine")
        gpus = self.facts.machine.get("gpus")
        what = f"{words} with {gpus}" if gpus and any(device.kind == "gpu" for device in tier.devices) else words
        return {
            "name": self.facts.name + tier.suffix, "description": f"{what}, measured as {tier.words}.",
            "corrections": list(self.facts.notes), "machine": dict(self.facts.machine),
            "compute": tier.compute, "backing": [tier.backing],
            "devices": {device.name: self.device(device, tier) for device in tier.devices},
            "links": {link.name: self.link(link, tier) for link in tier.links},
            "contention": list(self.contention(tier)),
        }  # fmt: skip

    def device(self, device: Device, tier: Tier) -> dict[str, Any]:
        found: dict[str, Any] = {"kind": device.kind, "role": device.role}
        if device.cores:
            found["cores"] = list(device.cores)
        sharing = sum(other.place == device.place for other in tier.devices)
        total, words = self.facts.memory_bytes[device.place], {"disk": "free space on the disk"}.get(device.place, "its memory")
        if sharing > 1:
            how = f"an equal share of the host's {format_bytes(total)}, which {sharing} devices of this profile use"
            found["memory_bytes"] = {"value": total // sharing, "source": "derived", "how": how}
        else:
            found["memory_bytes"] = self.read_off(total, f"{words}, as the system told")
        if device.kind == "disk":
            return found
        experts = list(self.experts(device, tier))
        found |= self.rates(device)
        gap = self.points_at("runtime", device.name, variant="resident")
        if len(gap):
            method = "time of a layer in which no lane was busy: a replay of experts of 6.3 MB, all resident"
            found["router_us"] = self.measured(us_of(float(gap["median_us"].iloc[0])), gap, method)
        if device.kind == "cpu":
            found |= self.linear(device)
        found["experts"] = experts
        found["parts"] = list(self.parts(device, tier))
        predict = self.predict(device)
        return {key: value for key, value in (found | predict | self.power(device)).items() if value not in ([], {})}

    def experts(self, device: Device, tier: Tier) -> Iterable[dict[str, Any]]:
        for subject, bits, shape in self.shapes():
            which = {"subject": subject, "bits": bits, "threads": device.threads}
            rows = self.points_at("expert", device.name, **which)
            if len(rows) < 2:
                continue
            curve = {"shape": {"hidden": shape.hidden, "intermediate": shape.intermediate, "bits": bits}}
            times, method = self.handed(device, tier, rows["median_us"].to_numpy(float), _METHODS["expert"])
            curve |= self.curve(rows["size"], times, rows, method)
            first, second = (self.points_at("expert_first", device.name, variant=variant, **which) for variant in ("", FOLLOWING))
            if len(first) and len(second):
                extra = max(0.0, float(first["median_us"].iloc[0]) - float(second["median_us"].iloc[0]))
                method = "first expert of one row after 5 ms of dense parts, less the one that follows; difference of medians"
                curve["first_extra_us"] = self.measured(us_of(extra), first, method)
            yield curve

    def linear(self, device: Device) -> dict[str, Any]:
        """Write the constants of experts of other shapes; few rows and many have rates of their own."""
        curves, tables = [], []
        for subject, bits, shape in self.shapes():
            rows = self.points_at("expert", device.name, subject=subject, bits=bits, threads=device.threads)
            if len(rows):
                operations = 2 * shape.n_mats * shape.hidden * shape.intermediate
                curves.append(Curve(shape.n_bytes, operations, rows["size"].to_numpy(int), rows["median_us"].to_numpy(float)))
                tables.append(rows)
        found = linear(curves)
        if found is None:
            return {}
        table = pd.concat(tables, ignore_index=True)
        fitted = "least squares of relative errors over experts of all shapes measured"
        few, many = table[table["size"] <= FEW], table[table["size"] > FEW]
        written = {
            "per_expert_us": self.measured(us_of(found.per_expert_us), few, f"what an expert takes whatever its size; {fitted}"),
            "per_row_us": self.measured(us_of(found.per_row_us), few, f"what a further row takes whatever its size; {fitted}"),
            "read_bytes_per_s": self.measured(round(found.read_bytes_per_s), few, f"weights of one row; {fitted}"),
            "few_row_flops": self.measured(round(found.few_row_flops), few, f"operations of rows 2 to {FEW}; {fitted}"),
        }
        if found.many_row_flops is not None:
            written["many_row_flops"] = self.measured(
                round(found.many_row_flops), many, f"operations of rows beyond {FEW}; {fitted}"
            )
            written["crossover_rows"] = self.read_off(FEW, "rows up to which they are called few")
        kept: dict[str, Any] = {key: number for key, number in written.items() if number["value"] or key.endswith("flops")}
        if rates := self.reading(device):  # what an expert takes whatever its size is in them
            kept = {"read_rates": rates} | {k: one for k, one in kept.items() if k not in ("per_expert_us", "read_bytes_per_s")}
        return {"expert_cost": kept}

    def reading(self, device: Device) -> list[dict[str, Any]]:
        """Write the rate of one row at each size of an expert, if several were measured for it."""
        if not self.wanted[0].sizes:
            return []
        bits, found = self.wanted[0].shapes[0].bits, {}
        for (subject, own), shape in all_shapes(self.wanted).items():
            rows = self.points_at("expert", device.name, subject=subject, bits=own, threads=device.threads)
            rows = rows[rows["size"] == 1]
            if own == bits and len(rows):
                found[shape.n_bytes] = subject, rows
        sizes = sorted(found)
        times = monotone(np.array([found[size][1]["median_us"].iloc[0] for size in sizes], dtype=float))
        rates = []
        for place, (size, us) in enumerate(zip(sizes, times, strict=True)):
            if place + 1 < len(sizes) and times[place + 1] <= us * (1 + _SAME):
                continue  # no longer for more bytes: the larger of both is kept
            subject, rows = found[size]
            how = f"bytes / time of one expert of {subject} at {bits:g} bits with one row, its start included; median"
            number = self.measured(
                round(1e6 * size / us), rows, how if us == rows["median_us"].iloc[0] else f"{how}, made monotone"
            )
            ends = [round(1e6 * size / float(rows[name].iloc[0])) for name in ("q75_us", "q25_us")]
            number["interval"] = [min(ends[0], number["value"]), max(ends[1], number["value"])]
            rates.append({"bytes": size, "bytes_per_s": number})
        return rates if len(rates) > 1 else []

    def handed(self, device: Device, tier: Tier, times: Any, method: str) -> tuple[Any, str]:
        """Add the time between two tasks of a device to those of its tasks."""
        gap = self.points_at("runtime", tier.compute, variant="between" if device.name == tier.compute else "between host")
        if not len(gap):
            return times, method
        us = float(gap["median_us"].iloc[0])
        return times + us, f"{method}; and {us:.0f} us from the end of one to the start of the next in a replay"

    def shapes(self) -> list[tuple[str, float, Any]]:
        found = {(subject_of(shape), shape.bits): shape for each in self.wanted for shape in each.shapes}
        return [(subject, bits, shape) for (subject, bits), shape in found.items()]

    def rates(self, device: Device) -> dict[str, Any]:
        best: dict[str, tuple[float, str, pd.DataFrame]] = {}
        for subject, bits, shape in self.shapes():
            rows = self.points_at("expert", device.name, subject=subject, bits=bits, threads=device.threads)
            weights = shape.n_mats * shape.hidden * shape.intermediate
            for place in range(len(rows)):
                one = rows.iloc[[place]]
                n, us = int(one["size"].iloc[0]), float(one["median_us"].iloc[0])
                told = f"{subject} of {bits:g} bits at {n} row{'' if n == 1 else 's'}"
                rates = {"flops": 2e6 * weights * n / us} | ({"memory_bytes_per_s": 1e6 * shape.n_bytes / us} if n == 1 else {})
                for key, rate in rates.items():
                    if key not in best or rate > best[key][0]:
                        best[key] = rate, told, one
        words = {"memory_bytes_per_s": "weights read", "flops": "operations done"}
        return {
            key: self.measured(
                round(best[key][0]), best[key][2], f"{words[key]} / time of the experts that reached most: {best[key][1]}"
            )
            for key in ("memory_bytes_per_s", "flops")
            if key in best
        }

    def parts(self, device: Device, tier: Tier) -> Iterable[dict[str, Any]]:
        for each in self.wanted:
            model = each.model.name
            for part in _PARTS:
                which = {"subject": model, "threads": device.threads}
                rows = self.points_at(part, device.name, **which)
                if len(rows) < 2:
                    continue
                sizes, times = rows["size"].to_numpy(), rows["median_us"].to_numpy(float)
                if part == "context":
                    times = monotone(times)
                    times = times - times[0]
                elif part == "leading":
                    attention = self.points_at("attention", device.name, **which).set_index("size")["median_us"]
                    kept = np.isin(sizes, attention.index)
                    rows, sizes = rows[kept], sizes[kept]
                    times = times[kept] - attention.loc[sizes].to_numpy(float)
                    if len(rows) < 2:
                        continue
                method = _METHODS[part]
                if part == "shared":
                    times, method = self.handed(device, tier, times, method)
                yield {"model": model, "part": part, **self.curve(sizes, times, rows, method)}

    def predict(self, device: Device) -> dict[str, Any]:
        """Write the cost of one product with a router, if there is one model: the format keeps one."""
        if len(self.wanted) != 1:
            return {}
        rows = self.points_at("predict", device.name, subject=self.wanted[0].model.name, threads=device.threads)
        if len(rows) < 2:
            return {}
        curve = self.curve(rows["size"], rows["median_us"], rows, _METHODS["predict"])
        return {"predict": dict.fromkeys(_ROUTER_PRODUCTS, curve)}

    def power(self, device: Device) -> dict[str, Any]:
        found = {}
        for variant, method in (("idle", "while nothing was done"), ("busy", "while experts of one row were computed")):
            rows = self.points_at("power", device.name, variant=variant)
            if len(rows):
                value = round(float(rows["median_us"].iloc[0]), 2)
                found[f"{variant}_w"] = self.measured(value, rows, f"power that the driver tells, {method}; median")
        if "idle_w" in found and "busy_w" in found:
            found["idle_w"]["value"] = min(found["idle_w"]["value"], found["busy_w"]["value"])
        return found

    def link(self, link: Link, tier: Tier) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if link.medium:
            found["medium"] = link.medium
        if link.cores:
            found["cores"] = list(link.cores)
        if "disk" in {device.place for device in tier.devices}:
            read = link.ends[0] == tier.backing
            method = f"{'reading' if read else 'writing'} pieces of a file, past the cache of the operating system"
            found["any"] = self.copies("disk_read" if read else "disk_write", link, "direct", method, tier)
            return found
        for variant in transfers(tier):
            words = {"chunked": "three chunks on streams of their own", "pageable": "from or to ordinary memory"}.get(
                variant, "whole"
            )
            found[variant or "any"] = self.copies(
                "copy", link, variant, f"copies between buffers that are not in the cache, {words}", tier
            )
        found |= self.crossing(tier)
        return found

    def crossing(self, tier: Tier) -> dict[str, Any]:
        """Write the time of activations, one way: copying by size, and the runtime's constant time."""
        rows = self.points_at("activation", tier.links[0].name, variant="round trip")
        if len(rows) < 2:
            return {}
        times, method = 0.5 * rows["median_us"].to_numpy(float), "half of the time in which rows crossed and as many came back"
        gaps = [self.points_at("runtime", tier.compute, variant=variant) for variant in ("host", "resident")]
        if all(len(gap) for gap in gaps):
            both = float(gaps[0]["median_us"].iloc[0]) - float(gaps[1]["median_us"].iloc[0])
            times = times - times[0] + max(float(times[0]), both / 2)
            method += "; of one row, half of what a layer's idle time grows by if its experts run on the host"
        return {"activation": self.transfer(rows, times, method)}

    def copies(self, kind: str, link: Link, variant: str, method: str, tier: Tier) -> dict[str, Any]:
        rows = self.points_at(kind, link.name, variant=variant)
        times, gap = rows["median_us"].to_numpy(float), self.points_at("runtime", tier.compute, variant="fetched")
        if len(gap):
            us = float(gap["median_us"].iloc[0])
            times, method = times + us, f"{method}, and {us:.0f} us from the end of one to the start of the next in a replay"
        return self.transfer(rows, times, method)

    def contention(self, tier: Tier) -> Iterable[dict[str, Any]]:
        rates = {(row["activity"], row["beside"]): row for row in self.pairs.to_dict("records")}
        for a, b in tier.pairs:
            if (a, b) in rates and (b, a) in rates:
                sides = [self.rate(rates[key]) for key in ((a, b), (b, a))]
                yield {"a": a, "b": b, "a_rate": sides[0], "b_rate": sides[1]}
        for activity, link, measured in tier.like:
            if (activity, measured) in rates and (measured, activity) in rates:
                how = f"taken over from {activity} with {measured}: the same copies, in the other direction"
                values = [self.rate(rates[key])["value"] for key in ((activity, measured), (measured, activity))]
                both = [{"value": value, "source": "derived", "how": how} for value in values]
                yield {"a": activity, "b": link, "a_rate": both[0], "b_rate": both[1]}

    def rate(self, row: Mapping[Any, Any]) -> dict[str, Any]:
        rate = float(row["rate"])
        told = "" if rate <= 1 else f"; the ratio was {rate:.4f}"
        return {
            "value": min(1.0, round(rate, 4)), "source": "measured", "date": self.facts.date,
            "method": f"time alone / time with {row['beside']}, in turns; medians of means over executions{told}",
            "repeats": int(row["n"]), "spread": f"interquartile range / median {100 * row['spread']:.2g} %",
        }  # fmt: skip
