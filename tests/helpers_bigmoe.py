"""Reader of `route_trace v1` files: the routing of an engine beside what its own cache really held."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple


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
    """Read a file."""
    lookups: list[Lookup] = []
    expert_bytes: dict[int, int] = {}
    for line in path.read_text().splitlines():
        if line.startswith("# layer="):
            facts = dict(part.split("=") for part in line[2:].split())
            expert_bytes[int(facts["layer"])] = int(facts["expert_bytes"])
        elif line[:1].isdigit():
            _, phase, step, layer, slot, expert, _, resident, read = line.split(",")
            place = (int(phase), int(step), int(layer), int(slot), int(expert))
            lookups.append(Lookup(*place, resident == "1", int(read)))
    return RouteTrace(lookups, expert_bytes)
