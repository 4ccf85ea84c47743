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

`moesim.hardware.implied` makes the whole profile of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from moesim.core.units import parse_bytes, parse_line, parse_rate, parse_time
from moesim.errors import ConfigError, ModelError, unknown_name
from moesim.hardware.numbers import Sourced
from moesim.hardware.places import PROOF
from moesim.hardware.read import failures, told
from moesim.hardware.schema import ProfileFile
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
        """Write it, or a part of it, as a number of a profile."""
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
            self.problems += [": ".join((_below(key, where), said)) for where, said in map(told, failures(failure))]
        try:
            found = READERS[key](value, f"numbers.{key}")
            self.problems += _unfit(key, found, str(value).strip())
        except ConfigError as error:
            self.problems.append(str(error))
        return None if len(self.problems) > before else Typed(found, str(value).strip(), proof)

    def _check_together(self) -> None:
        """Refuse a memory rate that contradicts the GPU's time of an expert."""
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
    """Report what is wrong with a quantity that is well written."""
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
