"""All that is wrong with a profile at once, for whoever writes one.

Checks of the format hide others. So what was found is replaced by a stand-in, in a copy, until nothing new is found.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from moesim.core.limits import BYTES, TOKENS
from moesim.errors import HardwareError
from moesim.hardware.build import build_profile
from moesim.hardware.load import read_profile
from moesim.hardware.read import described, failures, is_number, optional
from moesim.hardware.schema import ProfileFile
from moesim.hardware.short import READ_IN
from moesim.hardware.types import TRANSFERS, CostCurve, HardwareProfile
from moesim.model.parts import bits_to_bytes

_ROUNDS: Final = 20  # each mends all that it finds, so that a few are enough

_STAND_INS: Final[Sequence[tuple[str, Any]]] = (
    ("memory_bytes", int(BYTES.most)), ("_bytes", 0), ("bytes_per_s", 1e9), ("flops", 1e9), ("_rate", 1.0), ("_us", 0.0),
    ("idle_w", 0.0), ("_w", 1e9), ("_tokens", 1), ("_rows", 1), ("host_shared", False),
    ("points", [[1, 1.0], [int(TOKENS.most), 1.0]]), ("", 0),
)  # fmt: skip
"""By the end of its key, a value that no check of the whole objects to."""


def find_problems(source: str | Path | Mapping[str, Any], place: str) -> list[str]:
    """List all that is wrong with a profile; `HardwareError` if the file is none."""
    try:
        raw, path, _ = read_profile(source, place)
    except HardwareError as error:
        if not error.problems:
            raise
        return list(error.problems)
    found: list[str] = []
    mended = copy.deepcopy(raw)
    doubtful: set[str] = set()  # places of which nothing more is said
    for _ in range(_ROUNDS):
        try:
            ProfileFile.model_validate(mended)
            break
        except ValidationError as failure:
            errors, before = failures(failure), copy.deepcopy(mended)
            found += [one for one in map(": ".join, map(described, errors)) if one not in found]
            for one in errors:
                _mend(mended, one, doubtful)
            if mended == before:
                return [*found, "profile: there may be more, which shows once these are mended"]
    try:
        build_profile(mended, path or place)
    except HardwareError as error:
        more = list(error.problems) or [str(error)]
        found += [one for one in more if not any(one.startswith(at) or ("." in at and at in one) for at in doubtful)]
    return found


def _mend(raw: dict[str, Any], error: Mapping[str, Any], doubtful: set[str]) -> None:
    loc = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        _change(raw, loc, None)
        return
    key, _ = described(error)
    inside = key.removeprefix(".".join(map(str, loc))).removeprefix(".")  # of a mapping that was checked as a whole
    if inside and inside != "profile":
        loc = (*loc, *inside.split("."))
    heads = [loc[:end] for end in range(1, len(loc) + 1)]
    number = next((head for head in heads if is_number(head)), None)
    copies = next((head for head in heads if head[0] == "links" and head[-1] in (*TRANSFERS, "any", "activation")), None)
    left_out = next((head for head in reversed(heads) if optional(head)), None)
    if number is not None:
        value = next(value for end, value in _STAND_INS if str(number[-1]).endswith(end))
        doubtful |= {".".join(map(str, number[:-1]))} if len(number) > 3 else set()
        if loc[len(number) :] == ("value",):  # it may lack its proof as well
            _change(raw, loc, value)
        else:
            _change(raw, number, _stand_in(value))
    elif copies is not None:
        _change(raw, copies, {"latency_us": _stand_in(0.0), "bytes_per_s": _stand_in(1e9)})
    elif loc in (("name",), ("description",)):
        _change(raw, loc, "a stand-in")
    elif left_out is not None:
        doubtful.add(".".join(map(str, left_out)))
        _change(raw, left_out, None)


def _stand_in(value: Any) -> dict[str, Any]:
    return {"value": value, "source": "assumed", "why": "a stand-in"}


def _change(raw: Any, loc: Sequence[str | int], value: Any) -> None:
    here = raw
    for step in loc[:-1]:
        try:
            here = here[step]
        except (KeyError, IndexError, TypeError):  # it has been taken away
            return
    if isinstance(here, dict) and value is None:
        here.pop(loc[-1], None)
    elif isinstance(here, dict):
        here[loc[-1]] = value


def parts_lines(profile: HardwareProfile) -> Iterator[str]:
    """Report the rates of a machine from its parts with their ranges, and what was assumed."""
    for key, words in (("memory_bytes_per_s", "memory"), ("flops", "operations"), ("pinned.bytes_per_s", "copies")):
        for name, number in profile.numbers.items():
            if name.endswith(f".{key}") and name.startswith(("devices", "links")) and number.interval:
                unit, scale = ("TFLOP/s", 1e12) if key == "flops" else ("GB/s", 1e9)
                low, value, high = (f"{one / scale:.3g}" for one in (number.interval[0], number.value, number.interval[1]))
                yield f"{name.split('.')[1]}: {words} {value} {unit} ({low} to {high}), {number.source}"
    yield f"assumed: {profile.machine.get('assumed', 'nothing')}"


MOST: Final = 10**12  # bytes a second that the memory of no processor reaches: twelve channels of 8.8 GT/s are 845 GB/s


def reading_remarks(profile: HardwareProfile) -> Iterator[str]:
    """Report how fast each host with linear costs reads weights, and warn of the incredible."""
    for device in profile.devices.values():
        rates = {_rate(one): one for one in device.experts if one.form == "linear" and one.shape and one.first <= 1}
        if device.role != "host" or not rates:
            continue
        rate = max(rates)
        hidden, intermediate, bits = rates[rate].shape or (0, 0, 0.0)
        said = f"an expert of {hidden}x{intermediate} at {bits:g} bits takes {float(rates[rate].us(1)):g} us with one row"
        yield f"{device.name} reads weights at {_gb(rate)}: {said}"
        known = _known_rate(profile)
        most = f"the memory of {profile.compute} ({_gb(known)})" if known else f"{_gb(MOST)}, which no processor's memory reaches"
        if rate > (known or MOST):
            yield f"warning: {device.name} reads weights faster than {most}; check the time of an expert on {device.name}"


def _rate(one: CostCurve) -> Fraction:
    hidden, intermediate, bits = one.shape or (0, 0, 0.0)
    return bits_to_bytes(3 * hidden * intermediate, bits) * 10**6 / one.us(1)


def _known_rate(profile: HardwareProfile) -> int:
    """Return the memory rate of the computing device; 0 if it follows from an expert's time."""
    number = profile.numbers.get(f"devices.{profile.compute}.memory_bytes_per_s")
    known = number is not None and READ_IN not in number.ref
    return profile.devices[profile.compute].memory_bytes_per_s if known else 0


def _gb(rate: Fraction | int) -> str:
    return f"{float(rate) / 1e9:.4g} GB/s"
