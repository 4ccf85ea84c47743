"""The first steps of several runs as one timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moesim.core.files import write_bytes
from moesim.metrics.machine import Machine
from moesim.metrics.timeline.events import Event, timeline_events, timeline_json
from moesim.records import Records

_PIDS = 10  # process numbers of one run in a timeline of several
_FLOWS = 10**9  # numbers of arrows likewise


@dataclass(frozen=True)
class Timeline:
    """Chrome trace events of one run, or of several, one above another.

    Attributes
    ----------
    events : list of dict
        As Perfetto and chrome://tracing read them; times in us.
    """

    events: list[Event]

    @classmethod
    def of(cls, runs: Mapping[str, tuple[Records, Machine]], steps: int) -> Timeline:
        """Show the first steps of runs by policy.

        Parameters
        ----------
        runs : mapping of str to (Records, Machine)
            What happened, and on what.
        steps : int
            How many steps of each.

        Returns
        -------
        Timeline
        """
        events: list[Event] = []
        for i, (policy, (records, machine)) in enumerate(runs.items()):
            found = timeline_events(records, machine, (0, min(steps, len(records.steps)) - 1))
            events += _numbered(found, i, policy) if len(runs) > 1 else found
        return cls(events)

    def json(self) -> bytes:
        """Give the content of a file for https://ui.perfetto.dev."""
        return timeline_json(self.events)

    def save(self, path: str | Path) -> Path:
        """Write a file for https://ui.perfetto.dev; it appears complete or not at all.

        Parameters
        ----------
        path : str or Path
            The file.

        Returns
        -------
        Path
            The file.
        """
        return write_bytes(Path(path), self.json())

    def __repr__(self) -> str:
        return f"<Timeline: {len(self.events):,} events; save(path) writes a file for https://ui.perfetto.dev>"


def _numbered(events: list[Event], run: int, policy: str) -> list[Event]:
    """Give a run's events process and arrow numbers of their own, so that several runs stand one above another."""
    numbered = []
    for event in events:
        event = {**event, "pid": event["pid"] + _PIDS * run}
        if event["ph"] in ("s", "f"):
            event["id"] += _FLOWS * run
        if event["name"] == "process_name":
            event["args"] = {"name": f"{policy}: {event['args']['name']}"}
        if event["name"] == "process_sort_index":
            event["args"] = {"sort_index": event["pid"]}
        numbered.append(event)
    return numbered
