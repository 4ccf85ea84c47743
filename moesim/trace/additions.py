"""What was added to recorded routing afterwards: tables from part of the same recording, and numbers that nobody recorded.

A header says it under ``held_back`` and ``made_up``; whatever is computed from such a trace repeats it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesim.errors import TraceError

HELD_BACK = ("requests", "ends")
"""What calibration tables may be counted from: whole requests, which are then not in the trace, or the last tokens of each."""
MADE_UP = ("weights", "scores")
"""Arrays that may be made up: the same number for each chosen expert."""
UNITS = "units_per_expert"
"""Key of a trace whose ids are those of an expert's matrices, one after the other."""
_COUNTS = {"n": 1, "of": 1, "rows": 1, "seed": 0}


def made_up(header: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the arrays of a trace that are made up."""
    return tuple(header.get("made_up", ()))


def remarks(header: Mapping[str, Any]) -> tuple[str, ...]:
    """Say in a few words each what was added to the routing of a trace; none contains a comma.

    >>> remarks({"held_back": {"what": "requests", "n": 24, "of": 96, "rows": 900, "seed": 0}, "made_up": ["weights"]})
    ('calibrated on 24 held-back requests (seed 0)', 'weights uniform over the chosen')
    """
    found = [f"{name} uniform over the chosen" for name in made_up(header)]
    if (units := header.get(UNITS, 1)) > 1:
        found.append(f"{units} units per expert")
    if (held := header.get("held_back")) is not None:
        if held["what"] == "requests":
            text = f"{held['n']} held-back request{'s' * (held['n'] > 1)} (seed {held['seed']})"
        else:
            text = f"the held-back end of each request ({held['rows']} tokens in all)"
        found.insert(0, f"calibrated on {text}")
    return tuple(found)


def check_additions(header: Mapping[str, Any], place: str) -> None:
    """Check the entries of a header from which remarks are made."""
    names = header.get("made_up", [])
    if not isinstance(names, list) or any(name not in MADE_UP for name in names) or len(set(map(str, names))) != len(names):
        raise _wrong(f"{place}: header.made_up", f"some of {', '.join(MADE_UP)}", names)
    units = header.get(UNITS, 1)
    if not isinstance(units, int) or isinstance(units, bool) or units < 1:
        raise _wrong(f"{place}: header.{UNITS}", "an integer of at least 1", units)
    held = header.get("held_back")
    if held is None:
        return
    if not isinstance(held, dict) or held.get("what") not in HELD_BACK:
        raise _wrong(f"{place}: header.held_back", f"what, one of {', '.join(HELD_BACK)}, and numbers", held)
    for key, least in _COUNTS.items():
        value = held.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _wrong(f"{place}: header.held_back.{key}", f"an integer of at least {least}", value)


def _wrong(place: str, expected: str, got: object) -> TraceError:
    return TraceError(f"{place}: expected {expected}, got {repr(got)[:200]}; import or calibrate the trace again")
