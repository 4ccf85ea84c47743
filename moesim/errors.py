"""The error tree; every message is one line: what, where, expected, got, remedy.

Constructors take exactly one message: code that re-raises ``type(e)(*e.args)`` would hide the cause of a richer one.
"""

from __future__ import annotations

import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path


class MoesimError(Exception):
    """Base of everything moesim raises on purpose."""

    of_command: str | None = None
    """The message as a command prints it, with its options, where a function has named its arguments instead."""


class InputError(MoesimError):
    """An input of the user is wrong; the command line exits with 2 and writes nothing."""


class InterruptError(MoesimError):
    """Somebody pressed Ctrl-C; the command line exits with 130."""


class ConfigError(InputError):
    """An experiment file, an option or a name is wrong."""


class ModelError(InputError):
    """A model specification is wrong or impossible."""


class HardwareError(InputError):
    """A hardware profile is wrong, or lacks a cost that the run needs."""

    problems: tuple[str, ...] = ()
    """All that is wrong with the profile, one line each, where the message tells the first and how many more."""


class TraceError(InputError):
    """A trace is damaged, inconsistent, or does not fit the model or the policy."""


class WorkloadError(InputError):
    """A workload asks for what the trace does not hold."""


class CapacityError(InputError):
    """Something does not fit into the memory it should live in."""


class SimulationError(MoesimError):
    """A run failed; the command line exits with 1."""


class PolicyError(SimulationError):
    """A policy returned an action that cannot be run."""


class DeadlockError(SimulationError):
    """Nothing can happen any more, and work remains."""


class WriteError(MoesimError):
    """A disk fails while results are written; the command line exits with 1."""


class LiveError(SimulationError):
    """A run on the machine itself has failed."""


def install(extra: str) -> str:
    """Return how what an extra brings is installed; only this line changes once an index has moesim."""
    return f"in a checkout of moesim: pip install '.[{extra}]'"


def unknown_width(bits: float, widths: Sequence[float]) -> tuple[str, str]:
    """Report that a model has no experts of some bits, and the remedy."""
    has = " and ".join(f"{width:g}" for width in widths)
    return f"no experts of {bits:g} bits", f"set model.expert_bits to a list with {bits:g}; it has {has}"


def unknown_name(kind: str, name: str, known: Iterable[str], command: str = "") -> str:
    """Build the message for an unknown name; a command may stand for a long list.

    >>> unknown_name("policy", "fidler", ["fiddler", "dali"])
    "unknown policy 'fidler'; did you mean 'fiddler'? known: dali, fiddler"
    >>> unknown_name("key", "batch", ["batch_size", "n_batches"])
    "unknown key 'batch'; did you mean 'batch_size'? known: batch_size, n_batches"
    >>> unknown_name("policy", "Fidler", ["fiddler", "dali"], "moesim list policies")
    "unknown policy 'Fidler'; did you mean 'fiddler'? `moesim list policies` has all"
    >>> unknown_name("policy", "hybrimoe", ["hybrimoe-code", "dali", "hybrimoe-paper"], "moesim list policies")
    "unknown policy 'hybrimoe'; did you mean 'hybrimoe-code' or 'hybrimoe-paper'? `moesim list policies` has all"
    >>> unknown_name("policy", "least-recent", ["static", "lru", "dali", "belady"], "moesim list policies")
    "unknown policy 'least-recent'; nearest: static; `moesim list policies` has all"
    """
    names = sorted(known)
    if not isinstance(name, str):  # of a policy, whose action has a wrong type
        raise TypeError(f"expected a name, got {name!r}")
    close = _close(name, names)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    if command or len(names) > _LISTED:
        nearest = ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.3))
        found = hint or (f"nearest: {nearest}; " if nearest else "")
        return f"unknown {kind} '{name}'; {found}" + (f"`{command}` has all" if command else f"{len(names)} are known")
    return f"unknown {kind} '{name}'; {hint}known: {', '.join(names) or 'none'}"


_LISTED = 40  # names of which a message has all


def _close(name: str, names: Sequence[str]) -> list[str]:
    """Find the names that were probably meant: which begin with it, contain it, or are spelled almost so; at most four."""
    plain = {one: re.sub(r"[-_. ]", "", one.lower()) for one in names}
    short = re.sub(r"[-_. ]", "", name.lower())
    if same := [one for one in names if plain[one] == short]:
        return same[:4]
    if several := [one for one in names if one in (f"{name.lower()}s", f"{name.lower().removesuffix('y')}ies")]:
        return several
    word = re.escape(name.lower())
    begun = [one for one in names if re.match(rf"{word}[-_.]", one.lower())]
    begun += [one for one in names if len(short) > 3 and re.search(rf"[-_.]{word}$", one.lower())]
    inside = [one for one in names if len(short) > 3 and short in plain[one]]
    spelled = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(name.lower(), names, n=1)
    return (begun or spelled or inside)[:4]


_INTEGER = re.compile(r"[-+]?\d+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_RANGE = re.compile(r" of at (least|most) | from \S+ to ")
_CHOICES = re.compile(r"('[^']*'|true or false|null)( or ('[^']*'|true or false|null))*")
_FLAG = re.compile("true|false|yes|no|on|off", re.IGNORECASE)

IN_RANGE = "choose a value in this range"
"""Remedy of a number outside its bounds."""


def mistyped(expected: str, got: object) -> str:
    """Word what was expected of a value from YAML and what it is, with a remedy for its form.

    >>> mistyped("an integer", "3")
    "expected an integer, got '3'; write it without quotes"
    >>> mistyped("an integer of at least 1", 0)
    'expected an integer of at least 1, got 0; choose a value in this range'
    >>> mistyped("'a' or 'b'", "c")
    "expected 'a' or 'b', got 'c'; choose one of these"
    """
    kinds = {"number": _NUMBER, "integer": _INTEGER, "true or false": _FLAG}
    form = next((form for kind, form in kinds.items() if kind in expected), None)
    remedy = ""
    if isinstance(got, str) and form is not None and form.fullmatch(got.strip()):
        remedy = "; write it without quotes"
    elif got is not None and not isinstance(got, str | list | dict) and expected.startswith(("a text", "a string")):
        remedy = "; put it in quotes"
    elif _RANGE.search(expected) and (type(got) is int or (type(got) is float and "a number" in expected)):
        remedy = f"; {IN_RANGE}"
    elif " or " in expected and _CHOICES.fullmatch(expected):
        remedy = "; choose one of these"
    elif expected == "a list":
        remedy = "; put it in brackets"
    return f"expected {expected}, got {got!r}{remedy}"


def describe_exception(error: BaseException) -> str:
    """Describe in one line what another's code raised, and where."""
    text = " ".join(str(error).split())
    where = culprit(error)
    return type(error).__name__ + (f": {text}" if text else "") + (f" ({where})" if where else "")


def culprit(error: BaseException) -> str:
    """Name file and line of the last frame in a user's code, else in a package, else anywhere."""
    frames = []
    cause: BaseException | None = error
    while cause is not None:  # SimPy raises a copy, with the original as its cause
        frames.append([frame for frame in traceback.extract_tb(cause.__traceback__) if not frame.filename.startswith("<")])
        cause = cause.__cause__
    paths = sysconfig.get_paths()
    ours = [str(Path(__file__).parent), *(str(Path(paths[kind], "simpy")) for kind in ("purelib", "platlib"))]
    libraries = [paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    for others in ([*ours, *libraries], ours, []):
        for chain in frames:
            for frame in reversed(chain):
                if not any(Path(frame.filename).is_relative_to(folder) for folder in others):
                    return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""
