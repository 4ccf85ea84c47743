"""A machine from the numbers that a paper prints: the short form of a profile, and how the whole one follows from it.

.. code-block:: yaml

    name: mybox
    source: {source: published, ref: "Paper, Table 3"}   # of all numbers that state none
    for: {base: mixtral-8x7b, expert_bits: 4}            # whose expert the times are of
    numbers:
      pcie: 25GB/s                  # or transfer: 14.2ms, the time of a copy of an expert
      cpu: 150us + 40us/token       # or 40us/token
      gpu: 60us                     # or 60us + 1us/token
      gpu_memory: 936GB/s           # may be left out
      vram: 12GiB
      ram: 64GiB

What is typed keeps its source. What follows from it is `derived`; what nobody said is `assumed` and says that it is a default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from pydantic import ValidationError

from moesim.core.limits import TOKENS
from moesim.core.units import parse_bytes, parse_line, parse_rate, parse_time
from moesim.errors import ConfigError, ModelError, unknown_name
from moesim.hardware.numbers import Sourced
from moesim.hardware.overrides import flatten, override
from moesim.hardware.read import failures, refusal, told
from moesim.hardware.sections import PROOF, with_sources
from moesim.model import ModelSpec, load_model

FOR: Final = {"base": "mixtral-8x7b", "expert_bits": 4}
"""Whose expert the times are of, unless a profile says so."""
TYPED: Final = {"source": "assumed", "why": "typed in"}
"""Source of a number that states none, in a profile that states none."""

LATENCY_US: Final = 28
RATIO: Final = 80
WORKSPACE: Final = 2**30

_OWN: Final = ("name", "description", "corrections", "machine", "for", "numbers", "anchors")
"""Keys of the short form; any other is a key of the whole form, and replaces what would stand there."""

READERS: Final[Mapping[str, Callable[[Any, str], Any]]] = {
    "pcie": parse_rate, "transfer": parse_time, "cpu": parse_line, "gpu": parse_line, "gpu_memory": parse_rate,
    "vram": parse_bytes, "ram": parse_bytes,
}  # fmt: skip
"""The numbers, and what reads each."""
WANTED: Final[Mapping[str, str]] = {
    "pcie": "the rate of a copy to the GPU, such as 25GB/s, or transfer, the time of an expert's copy, such as 14.2ms",
    "cpu": "the time of an expert on the CPU, such as 150us + 40us/token",
    "gpu": "the time of an expert on the GPU, such as 60us",
    "vram": "the memory of the GPU, such as 12GiB",
    "ram": "the memory of the host, such as 64GiB",
}
"""What a profile needs, in words."""


@dataclass(frozen=True)
class _Typed:
    """A number as it was typed, read, with its source."""

    value: Any
    text: str
    proof: Mapping[str, Any]


class Short:
    """The short form of a profile: its numbers, and all that is wrong with them."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.problems: list[str] = []
        self._model = self._read_model()
        self._numbers = self._read_numbers()
        if not self.problems:
            self._check_together()

    # ------------------------------------------------------------------------------------------------------------ reading
    def _read_model(self) -> ModelSpec | None:
        try:
            model = _model_of(self.raw)
        except ModelError as error:
            self.problems.append(str(error))
            return None
        if model.expert_bytes_by_layer is not None or model.units_per_expert > 1 or model.low_bits:
            self.problems.append(
                f"for: expected experts of one size and width, got {model.name} with several; give expert_bits: 4"
            )
        return model

    def _read_numbers(self) -> dict[str, _Typed]:
        raw = self.raw["numbers"]
        if not isinstance(raw, Mapping):
            self.problems.append(f"numbers: expected a mapping with {', '.join(WANTED)}, got {raw!r}")
            return {}
        self.problems += [f"numbers: {unknown_name('number', str(key), READERS)}" for key in raw if key not in READERS]
        for key, words in WANTED.items():
            if raw.get(key) is None and not (key == "pcie" and raw.get("transfer") is not None):
                self.problems.append(f"numbers.{key}: expected {words}, got nothing; add it")
        if raw.get("pcie") is not None and raw.get("transfer") is not None:
            self.problems.append("numbers: expected pcie or transfer, got both; leave one out")
        found = {key: self._read(key, raw[key]) for key in READERS if raw.get(key) is not None}
        return {key: number for key, number in found.items() if number is not None}

    def _read(self, key: str, given: Any) -> _Typed | None:
        proof = {name: one for name, one in given.items() if name != "value"} if isinstance(given, Mapping) else dict(TYPED)
        value = given.get("value") if isinstance(given, Mapping) else given
        found, before = None, len(self.problems)
        for name in proof.keys() - set(PROOF):
            self.problems.append(f"numbers.{key}: {unknown_name('key', str(name), ('value', *PROOF))}")
        try:
            Sourced.model_validate({name: one for name, one in proof.items() if name in PROOF})
        except ValidationError as failure:
            self.problems += [": ".join((_below(key, where), said)) for where, said in map(told, failures(failure))]
        try:
            found = READERS[key](value, f"numbers.{key}")
            self.problems += _unfit(key, found, str(value).strip())
        except ConfigError as error:
            self.problems.append(str(error))
        return None if len(self.problems) > before else _Typed(found, str(value).strip(), proof)

    def _check_together(self) -> None:
        """Refuse a memory rate at which the GPU cannot be as fast as it says."""
        numbers = self._numbers
        if "gpu_memory" in numbers and self._n_bytes * 10**6 > self._first_us("gpu") * numbers["gpu_memory"].value:
            self.problems.append(
                f"numbers.gpu_memory: expected a rate at which {self._expert} can be read in numbers.gpu, "
                f"{numbers['gpu'].text}, got {numbers['gpu_memory'].text!r}; correct one of them"
            )

    # ------------------------------------------------------------------------------------------------------ the whole form
    def whole(self, place: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Give the profile in the whole form, and the keys that replace some of it. Raises `HardwareError` if it is wrong."""
        if self.problems:
            raise refusal(place, self.problems)
        numbers = self._numbers
        named = {key: self.raw[key] for key in ("name", "description", "corrections", "machine") if key in self.raw}
        gpu, cpu = self._gpu(), self._cpu()
        made = {
            "description": self._described(),
            **named,
            "compute": "gpu0",
            "backing": ["cpu0"],
            "devices": {
                "gpu0": {
                    "kind": "gpu",
                    "memory_bytes": {"value": numbers["vram"].value, **numbers["vram"].proof},
                    "workspace_bytes": {"value": WORKSPACE, **_default("1 GiB, for the driver and libraries")},
                    **gpu,
                },
                "cpu0": {"kind": "cpu", "memory_bytes": {"value": numbers["ram"].value, **numbers["ram"].proof}, **cpu},
            },
            "links": {"cpu0->gpu0": self._link("down"), "gpu0->cpu0": self._link("up")},
        }
        return made, {key: value for key, value in self.raw.items() if key not in _OWN}

    def _described(self) -> str:
        return (
            f"A GPU and a CPU from typed numbers and defaults; times are of {self._expert}. Attention and other dense parts read "
            "at the GPU's memory rate and launch nothing, so that their times are lower bounds where that rate is right. Nothing "
            "slows anything else down."
        )

    @property
    def _n_bytes(self) -> int:
        assert self._model is not None
        return self._model.expert_bytes(0)

    @property
    def _operations(self) -> int:
        """Operations of an expert for one row."""
        assert self._model is not None
        return 2 * self._model.expert_params

    @property
    def _expert(self) -> str:
        assert self._model is not None
        return _expert(self._model)

    @property
    def _shape(self) -> dict[str, Any]:
        assert self._model is not None
        model = self._model
        return {"hidden": model.hidden, "intermediate": model.expert_intermediate, "bits": model.expert_bits}

    def _first_us(self, key: str) -> Fraction:
        """Time of an expert for one row."""
        base, slope = self._numbers[key].value
        return Fraction(base + slope)

    def _read_rate(self, key: str) -> dict[str, Any]:
        """The memory rate that the time of one row implies."""
        typed = self._numbers[key]
        how = f"{self._expert} read in the time of one token, numbers.{key}: {typed.text}"
        return {"value": _rate(self._n_bytes, self._first_us(key)), **_derived(how)}

    def _cpu(self) -> dict[str, Any]:
        typed = self._numbers["cpu"]
        per_token = typed.value[1]
        flops = {
            "value": float(self._operations * 10**6 / per_token),
            **_derived(
                f"{self._operations} operations of {self._expert} in the time of a further token, numbers.cpu: {typed.text}"
            ),
        }
        return {
            "memory_bytes_per_s": self._read_rate("cpu"),
            "flops": flops,
            "expert_cost": {"few_row_flops": flops},
            "experts": [self._linear("cpu")],
        }

    def _linear(self, key: str) -> dict[str, Any]:
        typed = self._numbers[key]
        base, slope = ({"value": float(us), **typed.proof} for us in typed.value)
        return {"shape": self._shape, "form": "linear", "range": _ALL, "base_us": base, "per_token_us": slope}

    def _gpu(self) -> dict[str, Any]:
        typed = self._numbers["gpu"]
        memory = self._read_rate("gpu")
        if "gpu_memory" in self._numbers:
            memory = {"value": self._numbers["gpu_memory"].value, **self._numbers["gpu_memory"].proof}
        flat, per_token = typed.value
        if per_token:
            how = f"{self._operations} operations of {self._expert} in the time of a further token, numbers.gpu: {typed.text}"
            flops = {"value": float(self._operations * 10**6 / per_token), **_derived(how)}
            return {"memory_bytes_per_s": memory, "flops": flops, "experts": [self._linear("gpu")]}
        rate = RATIO * memory["value"]
        balance = f"{RATIO} operations a byte read, about an RTX 3090's (65.4e12 / 831e9 in rtx3090-epyc7532)"
        curve = {
            "shape": self._shape,
            "form": "flat_linear",
            "range": _ALL,
            "flat_us": {"value": float(flat), **typed.proof},
            "knee_tokens": {
                "value": max(1, math.floor(flat * rate / (self._operations * 10**6))),
                **_default(f"the rows whose operations take as long as numbers.gpu at {balance}"),
            },
            "per_token_us": {
                "value": float(Fraction(self._operations * 10**6, rate)),
                **_default(f"the operations of a row at {balance}"),
            },
        }
        return {"memory_bytes_per_s": memory, "flops": {"value": rate, **_default(balance)}, "experts": [curve]}

    def _link(self, way: str) -> dict[str, Any]:
        start = {"value": LATENCY_US, **_default(f"{LATENCY_US} us, as a V100's copies (te42kyfo/gpu-benches README)")}
        if "transfer" in self._numbers:
            typed = self._numbers["transfer"]
            within = {"value": 0, **_derived(f"contained in the time of a copy, numbers.transfer: {typed.text}")}
            how = f"{self._expert} copied in numbers.transfer: {typed.text}"
            rate, latency = {"value": _rate(self._n_bytes, typed.value), **_derived(how)}, within
        else:
            rate, latency = {"value": self._numbers["pcie"].value, **self._numbers["pcie"].proof}, start
        if way == "up":
            rate, latency = ({"value": one["value"], **_default("as cpu0->gpu0")} for one in (rate, latency))
        return {"any": {"latency_us": latency, "bytes_per_s": rate}, "activation": {"latency_us": start, "bytes_per_s": rate}}


_ALL: Final = [1, int(TOKENS.most)]
"""Rows for which a typed time holds."""


def whole_form(raw: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Give a profile with all that it may leave out: what follows from typed numbers, and the sources of sections."""
    whole = with_sources(raw)
    if "numbers" not in whole:
        return whole
    made, changes = Short(whole).whole(place)
    return override(made, dict(flatten(changes)), place)


def expert_of(raw: Mapping[str, Any]) -> str:
    """Say whose expert the times of a short form are of, in words. Raises `ModelError` if that is no model."""
    return _expert(_model_of(raw))


def _model_of(raw: Mapping[str, Any]) -> ModelSpec:
    given = raw.get("for", FOR)
    return given if isinstance(given, ModelSpec) else load_model(given, "for")


def _expert(model: ModelSpec) -> str:
    return f"an expert of {model.name} at {model.expert_bits:g} bits ({model.expert_bytes(0)} bytes)"


def _unfit(key: str, value: Any, text: str) -> Iterator[str]:
    """Say what is wrong with a quantity that is well written."""
    if key == "cpu" and not value[1]:
        yield (
            f"numbers.cpu: expected a time that grows with tokens, such as 150us + 40us/token, got {text!r}; "
            f"write {text}/token if that is the time of one token"
        )
    if key == "vram" and value <= WORKSPACE:
        yield (
            f"numbers.vram: expected more than the 1 GiB that the software of a GPU takes by default, got {text!r}; "
            "give more, or write the profile whole"
        )
    if key == "ram" and value == 0:
        yield f"numbers.ram: expected a size above 0 bytes, got {text!r}; write for example 64GiB"


def _below(key: str, where: str) -> str:
    return f"numbers.{key}" if where == "profile" else f"numbers.{key}.{where}"


def _default(what: str) -> dict[str, str]:
    return {"source": "assumed", "why": f"default: {what}"}


def _derived(how: str) -> dict[str, str]:
    return {"source": "derived", "how": how}


def _rate(n_bytes: int, us: Fraction) -> int:
    """The whole rate at which bytes take a time, to the nanosecond once that is rounded up."""
    return math.ceil(n_bytes * 10**6 / us)
