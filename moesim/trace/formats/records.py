"""Routing as people log it: what its columns and keys are called, and JSON records of any nesting.

A record names its request, token and layer by keys of ``names.yaml``; the lists and maps around the experts give the others.
Records without experts describe the file.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import ANSWERS, SMALLER, TooLargeError, lines, read_bytes
from moesim.core.yaml_reader import read_yaml_value
from moesim.trace.formats.contract import NO_PHASE, Lacks, reading, wrong

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = dict[str, NDArray[Any]]

#: Names of columns, facts, phases and containers in logs.
NAMES = read_yaml_value(resources.files(__package__).joinpath("names.yaml").read_text("utf-8"), "names.yaml")
PHASES = {name: number for number, phase in enumerate(("prefill", "decode")) for name in NAMES["phases"][phase]}
_AROUND = {name: counted for counted, names in NAMES["around"].items() for name in names}
_COLUMNS = ("request", "position", "layer", "phase", "step")
_NONE = -(2**63)  # no value in a column
_KNOWN = {name: (ours, rank) for ours, names in NAMES["columns"].items() for rank, name in enumerate(names)}
_KNOWN |= {f"{name}s": (ours, rank) for name, (ours, rank) in _KNOWN.items() if ours in ("expert", "weight", "count")}
_NUMBERED = re.compile(r"(?:.*?([a-z]+)[._ -]*)?(\d{1,9})(?:[._ -].*)?", re.IGNORECASE)


def canonical(name: str) -> str:
    """Return a name without capitals, separators, and endings such as ``_idx``."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return re.sub(r"(?:_(?:id|ids|idx|index|indices|no|num))+$", "", plain)


@lru_cache(4096)
def known(names: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
    """Find our names among those of a log, the best of each first."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        if (plain := canonical(name)) in _KNOWN:
            ours, rank = _KNOWN[plain]
            found.setdefault(ours, []).append((rank, name))
    return {ours: tuple(name for _, name in sorted(some)) for ours, some in found.items()}


def facts_in(node: Mapping[str, Any]) -> dict[str, Any]:
    """Find facts of the file in a record without experts, or in what it holds."""
    inner = (one for value in node.values() for one in (value[:8] if isinstance(value, list) else [value]))
    found = {key: value for one in inner if isinstance(one, dict) for key, value in facts_in(one).items()}
    for ours, names in NAMES["facts"].items():
        for value in (node[name] for name in names if name in node):
            if (type(value) is int and 0 < value < 2**31) if ours != "model" else (isinstance(value, str) and value):
                found[ours] = value
    return found


def documents(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the JSON of a file with its place: of each line, or of the whole."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(lines(file, ANSWERS), 1):
                try:
                    value = json.loads(line) if line.strip() else None
                except (ValueError, RecursionError) as error:
                    if number == 1:
                        break
                    raise wrong(f"{path}: line {number}", "JSON", error, "it is truncated or altered") from None
                if value is not None:
                    yield f"line {number}", value
            else:
                return
        yield "document", json.loads(read_bytes(path, ANSWERS))
    except TooLargeError as error:
        raise wrong(path, "JSON, one document or one a line", error.strerror, SMALLER) from None
    except (ValueError, RecursionError) as error:
        got = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise wrong(path, "JSON, one document or one a line", got, "it is truncated or altered") from None


def read_records(path: Path, mapped: Mapping[str, str], axes: Sequence[str] | None) -> tuple[Table, dict[str, Any]]:
    """Read JSON by our names, a row for each token in a layer; and the facts of the file."""
    if axes and axes[-1] != "ids":
        raise wrong(path, "ids as the last axis of nested lists", ",".join(axes), "save it with numpy.save")
    rows = _Rows(mapped, axes)
    for place, node in documents(path):
        rows.place = f"{path}: {place}"
        with reading(rows.place, "a record of routing"):
            rows.walk(node, {}, "")
    return rows.table(path), rows.facts


class _Rows:
    """Rows of a file, a token in a layer each."""

    def __init__(self, mapped: Mapping[str, str], axes: Sequence[str] | None) -> None:
        self.mapped, self.place, self.facts = mapped, "", dict[str, Any]()
        self.axes = [{"tokens": "position", "layers": "layer"}[axis] for axis in axes[:-1]] if axes else []
        self.columns = {name: array("q") for name in _COLUMNS if name != "phase" or "step" not in mapped}
        self.ids, self.weights, self.shape = array("q"), array("d"), tuple[int, ...]()
        self.requests: dict[Any, int] = {}
        self.seen: list[str] = []  # fields of a record without experts

    def walk(self, node: Any, at: Mapping[str, int], axis: str) -> None:
        """Add the rows of a value: of a place `at`, in lists of which the outer one counts `axis`."""
        if isinstance(node, list) and node and isinstance(node[0], dict):
            for number, child in enumerate(node):
                self.walk(child, {**at, axis: number} if axis else at, "")
            return
        if not isinstance(node, dict):
            if not isinstance(node, list):
                raise wrong(
                    self.place, "a list of experts", repr(node)[:80], "counts are read by: moesim trace calibrate --counts"
                )
            self._experts(node, None, at, axis)
            return
        here = {**at, **self._coordinates(node)}
        if (key := self._key("expert", node)) is not None:
            weight = self._key("weight", node)
            self._experts(node[key], None if weight is None else node[weight], here, axis)
        elif around := [name for name in node if name.lower() in _AROUND and isinstance(node[name], list | dict) and node[name]]:
            self.facts |= facts_in({name: value for name, value in node.items() if name not in around})
            for name in around:
                self.walk(node[name], here, _AROUND[name.lower()])
        elif (numbered := _numbered(node)) is not None:
            counted = axis or numbered[0] or self._of_keys(node, here)
            for number, child in numbered[1]:
                self.walk(child, {**here, counted: number}, "")
        elif here.keys() & {"layer", "position"}:
            raise wrong(self.place, "experts", f"the fields {', '.join(node)[:200]}", "map them with --column expert=NAME")
        else:
            self.seen = list(node)
            self.facts |= facts_in(node)

    def table(self, path: Path) -> Table:
        """Return the columns."""
        if not self.ids:
            got = f"none among the fields {', '.join(self.seen)[:200]}" if self.seen else "none"
            remedy = "map them with --column expert=NAME, layer=NAME and position=NAME"
            raise wrong(path, "experts of at least one token", got, remedy)
        found: Table = {"expert": np.frombuffer(self.ids, np.int64).reshape(-1, *self.shape)}
        if self.weights:
            found["weight"] = np.frombuffer(self.weights, np.float64).reshape(-1, *self.shape)
        for name, column in self.columns.items():
            values = np.frombuffer(column, np.int64)
            if (lacks := values == _NONE).any() and not lacks.all():
                got = f"none in row {np.argmax(lacks)}"
                raise wrong(f"{path}: {name}", "a value in all records or in none", got, "give all records the same keys")
            found |= {} if lacks.any() else {name: values}
        return found

    def _key(self, ours: str, node: Mapping[str, Any]) -> str | None:
        names = (self.mapped[ours],) if ours in self.mapped else known(tuple(node)).get(ours, ())
        said = ours in self.mapped  # other names of one expert, such as id, are names of other things too
        fits = (name for name in names if said or isinstance(node.get(name), list | dict) or canonical(name) == ours)
        return next((name for name in fits if name in node), None)

    def _coordinates(self, node: Mapping[str, Any]) -> dict[str, int]:
        names, found = known(tuple(node)), {}
        for ours in self.columns:
            text = str if ours in ("request", "phase") else int
            some = (self.mapped[ours],) if ours in self.mapped else names.get(ours, ())
            for value in [node[name] for name in some if name in node and type(node[name]) in (int, text)][:1]:
                found[ours] = self.requests.setdefault(value, len(self.requests)) if ours == "request" else value
                if ours == "phase":
                    found[ours] = PHASES.get(str(value).lower(), _NONE)
                    if found[ours] == _NONE:
                        raise wrong(f"{self.place}: phase", "prefill or decode, or 0 or 1", repr(value)[:80], NO_PHASE)
        return found

    def _open(self, at: Mapping[str, int]) -> list[str]:
        return [axis for axis in self.axes or ("layer", "position") if axis not in at]

    def _of_keys(self, node: Any, at: Mapping[str, int]) -> str:
        """Return what the numbers that are the keys of a map count."""
        axes, depth = self._open(at), 0
        while isinstance(node, list | dict) and node and (isinstance(node, list) or _numbered(node)):
            depth, node = depth + 1, node[0] if isinstance(node, list) else next(iter(node.values()))
        depth -= not isinstance(node, dict)  # the innermost list has the ids
        if not 0 < depth <= len(axes) or (len(axes) == 2 and not self.axes):
            raise Lacks(self.place, ["axes"], "maps whose keys are numbers", [*self.facts, *at])
        return axes[len(axes) - depth]

    def _experts(self, ids: Any, weights: Any, at: Mapping[str, int], axis: str) -> None:
        place = f"{self.place}: expert"
        ids, weights = _unzipped(ids, weights)
        experts, axes = np.array(ids), sorted(self._open(at), key=lambda one: one != axis)
        if experts.dtype.kind not in "iu" or not experts.size:
            raise wrong(place, "whole numbers, ids of experts", repr(ids)[:100])
        depth = max(0, experts.ndim - 1)
        if depth and len(axes) == 2 and not self.axes and axis not in axes:
            raise Lacks(self.place, ["axes"], f"lists of {experts.ndim} axes without keys", [*self.facts, *at])
        if depth > len(axes):
            raise wrong(self.place, "a list of the experts of a token in a layer", f"lists of {experts.ndim} axes")
        if self.ids and experts.shape[-1:] != self.shape:
            remedy = "every token uses the same number of experts"
            got = experts.shape[-1] if experts.ndim else 1
            raise wrong(place, f"{self.shape[0] if self.shape else 1} values as in the rows before", got, remedy)
        factors = None if weights is None or weights == [] else np.array(weights, np.float64)
        if (factors is not None and factors.shape != experts.shape) or (self.ids and (factors is None) == bool(self.weights)):
            got = "none" if factors is None else factors.shape
            raise wrong(f"{self.place}: weight", f"{experts.shape} values as of experts, in all records or in none", got)
        self.shape, lead = experts.shape[-1:], experts.shape[:-1]
        inner = axes[:depth] if axis in axes else axes[len(axes) - depth :]
        n_rows, counted = math.prod(lead), dict[str, list[int]]()
        if depth:
            counted = dict(zip(inner, np.indices(lead).reshape(depth, n_rows).tolist(), strict=True))
        for name, column in self.columns.items():
            column.extend(counted.get(name) or [at.get(name, _NONE)] * n_rows)
        self.ids.extend(experts.ravel().tolist())
        self.weights.extend([] if factors is None else factors.ravel().tolist())


def _unzipped(ids: Any, weights: Any) -> tuple[Any, Any]:
    """Separate ids and weights of lists of objects."""
    if not isinstance(ids, list) or not ids or not isinstance(ids[0], list | dict):
        return ids, weights
    if isinstance(ids[0], dict):
        names = known(tuple(ids[0]))
        found = [entry[names["weight"][0]] for entry in ids] if "weight" in names else weights
        return [entry[names["expert"][0]] for entry in ids], found
    inner = [_unzipped(one, None) for one in ids]
    return [one for one, _ in inner], weights if inner[0][1] is None else [found for _, found in inner]


def _numbered(node: Mapping[str, Any]) -> tuple[str, list[tuple[int, Any]]] | None:
    """Read a map whose keys are numbers, such as 3 or ``layers.3``; and what the words of the keys name."""
    found = [_NUMBERED.fullmatch(key) for key in node]
    if not found or not all(found):
        return None
    named = {_KNOWN.get(canonical(match[1] or ""), ("",))[0] for match in found if match} & {"layer", "position"}
    numbers = [int(match[2]) for match in found if match]
    return named.pop() if len(named) == 1 else "", list(zip(numbers, node.values(), strict=True))
