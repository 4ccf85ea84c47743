"""The whole profile that follows from a short one.

What is typed keeps its source, what follows is `derived`, and defaults are `assumed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

from moesim.core.limits import TOKENS
from moesim.errors import HardwareError
from moesim.hardware.overrides import flatten, override, sourced
from moesim.hardware.places import with_sources
from moesim.hardware.read import refusal
from moesim.hardware.short import OWN, WORKSPACE, Short, Typed, expert_words
from moesim.model import ModelSpec

LATENCY_US: Final = 28
RATIO: Final = 80  # operations a byte read

DOTTED: Final = "numbers."  # how the dotted keys of typed numbers begin
_COPIES: Final = {"pcie", "transfer"}

READ_IN: Final = "read in the time of one token"
"""In the words of a memory rate that nobody gave: it follows from an expert's time."""

_ALL: Final = [1, int(TOKENS.most)]  # rows for which a typed time holds


def whole_form(raw: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Complete a profile: what follows from typed numbers, and the sources of sections."""
    whole = with_sources(raw)
    typed = {str(key): whole.pop(key) for key in list(whole) if str(key).startswith(DOTTED)}
    if typed:
        whole = retyped(whole, {key.removeprefix(DOTTED): sourced(value) for key, value in typed.items()}, place)
    if "numbers" not in whole:
        return whole
    short = Short(whole)
    if short.problems or short.model is None:
        raise refusal(place, short.problems)
    made = _Implied(short.model, short.numbers).profile()
    made |= {key: whole[key] for key in ("name", "description", "corrections", "machine") if key in whole}
    own = {key: value for key, value in whole.items() if key not in OWN}
    _leave_out_lines(made, own.get("links"))
    return override(made, dict(flatten(own)), place)


def _leave_out_lines(made: dict[str, Any], links: Any) -> None:
    """Remove a copy's derived line where the profile has points for that copy."""
    for name, copies in links.items() if isinstance(links, Mapping) else ():
        for kind, curve in copies.items() if isinstance(copies, Mapping) else ():
            line = made["links"].get(name, {}).get(kind)
            if isinstance(curve, Mapping) and "points" in curve and isinstance(line, dict):
                for key in ("latency_us", "bytes_per_s"):
                    line.pop(key, None)


def retyped(raw: dict[str, Any], typed: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Replace numbers of a short form; one way to write how fast copies are replaces the other."""
    if not isinstance(raw.get("numbers"), Mapping):
        raise HardwareError(
            f"{place}: numbers: expected a profile that has numbers, got {raw.get('name')}, which is written whole; "
            "override keys such as devices.gpu0.flops"
        )
    kept = {key: value for key, value in raw["numbers"].items() if not (key in _COPIES and _COPIES & typed.keys())}
    return {**raw, "numbers": {**kept, **typed}}


class _Implied:
    """The parts of a machine with these numbers, which are of an expert of a model."""

    def __init__(self, model: ModelSpec, numbers: Mapping[str, Typed]) -> None:
        self._numbers = numbers
        self._expert = expert_words(model)
        self._n_bytes = model.expert_bytes(0)
        self._operations = 2 * model.expert_params  # of a row
        self._shape = {"hidden": model.hidden, "intermediate": model.expert_intermediate, "bits": model.expert_bits}

    def profile(self) -> dict[str, Any]:
        vram, ram = self._numbers["vram"], self._numbers["ram"]
        workspace = {"value": WORKSPACE, **_default("1 GiB, for the driver and libraries")}
        return {
            "description": (
                f"A GPU and a CPU from typed numbers and defaults; times are of {self._expert}. Attention and other dense parts "
                "read at the GPU's memory rate and launch nothing, so that their times are lower bounds where that rate is "
                "right. Nothing slows anything else down."
            ),
            "compute": "gpu0",
            "backing": ["cpu0"],
            "devices": {
                "gpu0": {"kind": "gpu", "memory_bytes": vram.number(), "workspace_bytes": workspace, **self._gpu()},
                "cpu0": {"kind": "cpu", "memory_bytes": ram.number(), **self._cpu()},
            },
            "links": {"cpu0->gpu0": self._link("down"), "gpu0->cpu0": self._link("up")},
        }

    def _gpu(self) -> dict[str, Any]:
        typed = self._numbers["gpu"]
        memory = self._numbers["gpu_memory"].number() if "gpu_memory" in self._numbers else self._read_rate("gpu")
        flat, per_token = typed.value
        if per_token:
            return {"memory_bytes_per_s": memory, "flops": self._flops("gpu"), "experts": [self._linear("gpu")]}
        flops = RATIO * memory["value"]
        most = max(1, math.floor(flat * flops / (self._operations * 10**6)))
        curve = {
            "shape": self._shape,
            "form": "flat_linear",
            "range": _ALL,
            "flat_us": typed.number(float(flat)),
            "knee_tokens": {"value": most, **_default("rows whose operations take as long as numbers.gpu at devices.gpu0.flops")},
            "per_token_us": {
                "value": float(Fraction(self._operations * 10**6, flops)),
                **_default("operations of a row at devices.gpu0.flops"),
            },
        }
        why = _default(f"{RATIO} operations a byte read, about an RTX 3090's (65.4e12 / 831e9 in rtx3090-epyc7532)")
        return {"memory_bytes_per_s": memory, "flops": {"value": flops, **why}, "experts": [curve]}

    def _cpu(self) -> dict[str, Any]:
        """Reading hides the first row's operations, so that other shapes follow the same rates."""
        flops = self._flops("cpu")
        return {
            "memory_bytes_per_s": self._read_rate("cpu"),
            "flops": flops,
            "expert_cost": {"few_row_flops": flops},
            "experts": [self._linear("cpu")],
        }

    def _read_rate(self, key: str) -> dict[str, Any]:
        typed = self._numbers[key]
        how = f"{self._expert} {READ_IN}, numbers.{key}: {typed.text}"
        return {"value": _rate(self._n_bytes, sum(typed.value)), **_derived(how)}

    def _flops(self, key: str) -> dict[str, Any]:
        typed = self._numbers[key]
        how = f"{self._operations} operations of {self._expert} in the time of a further token, numbers.{key}: {typed.text}"
        return {"value": float(self._operations * 10**6 / typed.value[1]), **_derived(how)}

    def _linear(self, key: str) -> dict[str, Any]:
        typed = self._numbers[key]
        base, slope = (typed.number(float(us)) for us in typed.value)
        return {"shape": self._shape, "form": "linear", "range": _ALL, "base_us": base, "per_token_us": slope}

    def _link(self, way: str) -> dict[str, Any]:
        start = {"value": LATENCY_US, **_default(f"{LATENCY_US} us, as a V100's copies (te42kyfo/gpu-benches README)")}
        if "transfer" in self._numbers:
            typed = self._numbers["transfer"]
            rate = {
                "value": _rate(self._n_bytes, typed.value),
                **_derived(f"{self._expert} copied in numbers.transfer: {typed.text}"),
            }
            latency = {"value": 0, **_derived(f"contained in the time of a copy, numbers.transfer: {typed.text}")}
        else:
            rate, latency = self._numbers["pcie"].number(), start
        if way == "up":
            rate, latency = ({"value": one["value"], **_default("as cpu0->gpu0")} for one in (rate, latency))
        return {"any": {"latency_us": latency, "bytes_per_s": rate}, "activation": {"latency_us": start, "bytes_per_s": rate}}


def _default(what: str) -> dict[str, str]:
    return {"source": "assumed", "why": f"default: {what}"}


def _derived(how: str) -> dict[str, str]:
    return {"source": "derived", "how": how}


def _rate(n_bytes: int, us: Fraction) -> int:
    """Return the whole rate at which bytes take a time."""
    return math.ceil(n_bytes * 10**6 / us)
