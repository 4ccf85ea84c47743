"""Lookups of a `route_trace v1` file, next to what the engine's own cache really held."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from moesim.trace.formats.contract import Probe
from moesim.trace.formats.tables import read_csv


class Lookup(NamedTuple):
    """One expert of one token in one layer."""

    phase: int  # 0 prefill, 1 decode
    step: int  # number of the token
    layer: int
    slot: int  # rank
    expert: int
    resident: bool  # as the engine recorded it
    read_bytes: int  # what it read from storage for this lookup


@dataclass(frozen=True)
class RouteTrace:
    """Lookups in the order of the file, and bytes of an expert of each layer."""

    lookups: list[Lookup]
    expert_bytes: dict[int, int]

    def visits(self, phase: int) -> list[list[Lookup]]:
        """Group the lookups by what the engine does at once.

        Prefill goes through a layer with all its tokens before the next; decode takes a token at a time.
        """
        chosen = [x for x in self.lookups if x.phase == phase]
        key = (lambda x: x.layer) if phase == 0 else (lambda x: (x.step, x.layer))
        return [list(group) for _, group in groupby(chosen, key=key)]


def read_route_trace(path: Path) -> RouteTrace:
    """Read a file with the importer's own reader."""
    preamble = Probe(path).preamble
    names = ("phase", "step", "layer", "slot", "expert", "residency", "expert_bytes")
    table = read_csv(path, {name: name for name in names}, skip=len(preamble))
    table["residency"] = table["residency"] == 1
    columns = [table[name].tolist() for name in names]
    n_bytes = [int(found) for found in re.findall(r"# layer=\d+ expert_bytes=(\d+)", "\n".join(preamble))]
    return RouteTrace([Lookup(*values) for values in zip(*columns, strict=True)], dict(enumerate(n_bytes)))
