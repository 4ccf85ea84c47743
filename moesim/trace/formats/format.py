"""What a format of routing is: how it is recognised, what it may ask the user, what it hands over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moesim.trace.formats.contract import Options, Part
from moesim.trace.formats.probe import Probe
from moesim.trace.formats.store import Store


@dataclass(frozen=True)
class Format:
    """One format of routing."""

    name: str  # for `--format`
    about: str  # one line for lists
    matches: Callable[[Probe], bool]  # whether a file looks like it, from its first bytes. Must not raise
    # puts the routing of a file into a store and says what else it found. Raises `TraceError` with the file and the place in it
    read: Callable[[Path, Options, Store], Part]
    # `measured` if only an engine writes this format; None if nothing in it says where the figures come from, so that the user
    # must
    label: str | None = "measured"
    columns: tuple[str, ...] = ()  # our names of the columns or arrays that `--column` may map; empty if theirs are fixed
    first_layer: bool = False  # whether it has layers without experts, which `--first-layer` leaves out
