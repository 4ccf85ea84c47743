"""The short form of a profile: a machine from the numbers that a paper prints.

.. code-block:: yaml

    name: mybox
    source: {source: published, ref: "Paper, Table 3"}   # of all numbers that state none
    for: {base: mixtral-8x7b, expert_bits: 4}            # whose expert the times are of
    numbers:
      pcie: 25GB/s                  # or transfer: 14.2ms, the time of a copy of an expert
      cpu: 1.5ms + 400us/token      # or 2ms/token
      gpu: 200us                    # or 200us + 10us/token
      gpu_memory: 504GB/s           # may be left out
      vram: 12GiB
      ram: 64GiB

In the whole profile that follows, what is typed keeps its source, what follows is `derived`, and defaults are `assumed`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from pydantic import ValidationError

from moesim.core.limits import TOKENS
from moesim.core.units import parse_bytes, parse_line, parse_rate, parse_time
from moesim.errors import ConfigError, HardwareError, ModelError, unknown_name
from moesim.hardware.rates import assembled, name_of
from moesim.hardware.read import PROOF, described, failures, flatten, override, refusal, sourced, with_sources
from moesim.hardware.schema import ProfileFile, Sourced
from moesim.model import ModelSpec, load_model

FOR: Final = {"base": "mixtral-8x7b", "expert_bits": 4}  # whose expert the times are of, unless a profile says so
TYPED: Final = {"source": "assumed", "why": "typed in"}  # source of a number that states none, in a profile that states none

WORKSPACE: Final = 2**30  # bytes of the GPU's memory that its software takes

OWN: Final = ("name", "description", "corrections", "machine", "for", "numbers", "anchors")
"""Keys of the short form; any other is a key of the whole form, and replaces what would stand there."""

READERS: Final[Mapping[str, Callable[[Any, str], Any]]] = {
    "pcie": parse_rate, "transfer": parse_time, "cpu": parse_line, "gpu": parse_line, "gpu_memory": parse_rate,
    "vram": parse_bytes, "ram": parse_bytes,
}  # fmt: skip
"""The numbers, and what reads each."""
WANTED: Final[Mapping[str, str]] = {
    "pcie": "the rate of a copy to the GPU, such as 25GB/s, or transfer, the time of an expert's copy, such as 14.2ms",
    "cpu": "the time of an expert on the CPU, such as 1.5ms + 400us/token",
    "gpu": "the time of an expert on the GPU, such as 200us",
    "vram": "the memory of the GPU, such as 12GiB",
    "ram": "the memory of the host, such as 64GiB",
}
"""What a profile needs, in words."""


@dataclass(frozen=True)
class Typed:
    """A number as it was typed, read, with its source."""

    value: Any
    text: str
    proof: Mapping[str, Any]

    def number(self, value: Any = None) -> dict[str, Any]:
        return {"value": self.value if value is None else value, **self.proof}


class Short:
    """The short form of a profile: its numbers, and all that is wrong with them."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self._wrong_proofs: list[Mapping[str, Any]] = []
        known = {*OWN, *ProfileFile.model_fields}
        self.problems = [_unknown(str(key), known) for key in raw if str(key).partition(".")[0] not in known]
        self.model = self._read_model()
        self.numbers = self._read_numbers()
        if not self.problems:
            self._check_together()

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

    def _read_numbers(self) -> dict[str, Typed]:
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

    def _read(self, key: str, given: Any) -> Typed | None:
        proof = {name: one for name, one in given.items() if name != "value"} if isinstance(given, Mapping) else dict(TYPED)
        value = given.get("value") if isinstance(given, Mapping) else given
        found, before = None, len(self.problems)
        for name in proof.keys() - set(PROOF):
            self.problems.append(f"numbers.{key}: {unknown_name('key', str(name), ('value', *PROOF))}")
        try:
            Sourced.model_validate({name: one for name, one in proof.items() if name in PROOF})
        except ValidationError as failure:
            if proof in self._wrong_proofs:  # one source of many numbers is one error
                return None
            self._wrong_proofs.append(proof)
            self.problems += [": ".join((_below(key, where), said)) for where, said in map(described, failures(failure))]
        try:
            found = READERS[key](value, f"numbers.{key}")
            self.problems += _unfit(key, found, str(value).strip())
        except ConfigError as error:
            self.problems.append(str(error))
        return None if len(self.problems) > before else Typed(found, str(value).strip(), proof)

    def _check_together(self) -> None:
        assert self.model is not None
        if "gpu_memory" not in self.numbers:
            return
        memory, gpu = self.numbers["gpu_memory"], self.numbers["gpu"]
        if self.model.expert_bytes(0) * 10**6 > sum(gpu.value) * memory.value:
            self.problems.append(
                f"numbers.gpu_memory: expected a rate at which {expert_words(self.model)} can be read in numbers.gpu, "
                f"{gpu.text}, got {memory.text!r}; correct one of them"
            )


def expert_of(raw: Mapping[str, Any]) -> str:
    """Name the expert that the times of a short form are of."""
    return expert_words(_model_of(raw))


def _model_of(raw: Mapping[str, Any]) -> ModelSpec:
    given = raw.get("for", FOR)
    return given if isinstance(given, ModelSpec) else load_model(given, "for")


def expert_words(model: ModelSpec) -> str:
    """Name an expert of a model, with its size."""
    return f"an expert of {model.name} at {model.expert_bits:g} bits ({model.expert_bytes(0)} bytes)"


def _unknown(key: str, known: Iterable[str]) -> str:
    numbers = difflib.get_close_matches(key, READERS, n=1)
    return f"unknown key '{key}'; did you mean numbers.{numbers[0]}?" if numbers else unknown_name("key", key, known)


def _unfit(key: str, value: Any, text: str) -> Iterator[str]:
    if key == "cpu" and not value[1]:
        yield (
            f"numbers.cpu: expected a time that grows with tokens, such as 1.5ms + 400us/token, got {text!r}; "
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
    if "parts" in whole:
        return of_parts(whole, place)
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


def of_parts(whole: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Complete a profile that has ``parts``; any other key replaces what would stand there."""
    parts, own = whole["parts"], {key: value for key, value in whole.items() if key not in (*_SAID, "parts", "anchors")}
    if isinstance(parts, Mapping):
        parts = {**parts, **{key.removeprefix(PARTS): own.pop(key) for key in list(own) if key.startswith(PARTS)}}
    if "numbers" in own:
        raise HardwareError(f"{place}: expected parts or numbers, got both; leave one out")

    def change(made: dict[str, Any]) -> dict[str, Any]:
        _leave_out_lines(made, own.get("links"))
        if any(key.startswith(_READ) for key, _ in flatten(own)):
            for device in made["devices"].values():
                device.get("expert_cost", {}).pop("read_share", None)
        return override(made, dict(flatten(own)), place)

    later = {key: own.pop(key) for key in list(own) if key.startswith("contention.")}  # of what follows from the rest
    made = override(assembled(parts, place, change, contends="contention" not in own), later, place)
    words = made["machine"] | (whole.get("machine") or {})
    said = {key: whole[key] for key in _SAID if key in whole}
    return {"name": name_of(parts)} | made | said | {"machine": words}


PARTS: Final = "parts."  # how the dotted keys of parts begin
_SAID: Final = ("name", "description", "corrections", "machine")
_READ: Final = "devices.cpu0.expert_cost.read_"


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
    return math.ceil(n_bytes * 10**6 / us)
