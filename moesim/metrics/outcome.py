"""The result of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moesim.errors import MoesimError
from moesim.metrics.breakdown import Breakdown
from moesim.metrics.machine import Machine
from moesim.metrics.summary import Value
from moesim.records import Records


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes
    ----------
    row : dict of str to value
        Settings, labels and metrics; ``error`` is None if it succeeded.
    machine : Machine
    records, split
        If they were asked for and the run succeeded.
    failure : MoesimError or None
        Why it failed.
    provenance : mapping
        Where the costs that were used come from.
    found : object
        What a study found in the records, where the run was.
    """

    row: dict[str, Value]
    machine: Machine
    records: Records | None = None
    split: Breakdown | None = None
    failure: MoesimError | None = None
    provenance: Mapping[str, Any] | None = None
    found: Any = None
