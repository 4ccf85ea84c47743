"""What a format of routing is: how it is recognised, what it may ask the user, what it hands over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moesim.traces_io.contract import Options, Part
from moesim.traces_io.probe import Probe
from moesim.traces_io.store import Store


@dataclass(frozen=True)
class Format:
    """One format of routing.

    Attributes
    ----------
    name : str
        For ``--format``.
    about : str
        One line for lists.
    matches : callable
        Whether a file looks like it, from its first bytes. Must not raise.
    read : callable
        Puts the routing of a file into a store and says what else it found. Raises `TraceError` with the file
        and the place in it.
    label : str or None
        ``measured`` if only an engine writes this format; None if nothing in it says where the figures come
        from, so that the user must.
    columns : tuple of str
        Our names of the columns or arrays that ``--column`` may map; empty if theirs are fixed.
    first_layer : bool
        Whether it has layers without experts, which ``--first-layer`` leaves out.
    """

    name: str
    about: str
    matches: Callable[[Probe], bool]
    read: Callable[[Path, Options, Store], Part]
    label: str | None = "measured"
    columns: tuple[str, ...] = ()
    first_layer: bool = False
