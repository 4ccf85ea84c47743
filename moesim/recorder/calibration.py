"""Calibration tables, counted over requests that are not in the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from moesim.recorder.errors import RecordError
from moesim.recorder.generation import Sampling
from moesim.recorder.hooks import Wanted
from moesim.recorder.recording import Recorder
from moesim.trace import shards
from moesim.trace.stats.calibration import MATRICES, Counts


@dataclass(frozen=True)
class CalibrationFile:
    """Calibration tables that were made before."""

    path: Path
    tables: dict[str, NDArray[Any]]  # see `Counts.tables`
    requests: list[dict[str, Any]]  # what they were counted over, with the hashes of the prompts
    # model, routers_sha256: whose they are
    model: str
    routers_sha256: str

    @classmethod
    def read(cls, path: Path) -> CalibrationFile:
        """Read the tables of a recorded trace."""
        arrays, header = shards.read_tables(path)
        tables = shards.calibration_tables(arrays)
        if not tables:
            raise RecordError(f"{path}: expected calibration tables, got {sorted(arrays)}; record with --calibrate first")
        requests = header.get("calibration_requests")
        if not isinstance(requests, list) or not all(isinstance(request, dict) for request in requests):
            raise RecordError(f"{path}: header.calibration_requests: expected a list of requests, got none; calibrate again")
        return cls(path, tables, requests, str(header.get("model")), str(header.get("routers_sha256")))

    def check_model(self, recorder: Recorder, routers_sha256: str) -> None:
        """Check that it is of this very model."""
        if self.routers_sha256 != routers_sha256:
            raise RecordError(
                f"{self.path}: expected calibration of this model's routers ({routers_sha256[:12]}...), got that of "
                f"'{self.model}' ({self.routers_sha256[:12]}...); calibrate this model"
            )
        for name, table in counts_of(recorder).tables().items():
            found = self.tables.get(name)
            if found is None or found.shape == table.shape:
                continue
            if name != MATRICES or found.ndim != 3 or found.shape[::2] != table.shape[::2]:
                raise RecordError(
                    f"{self.path}: calibration/{name}: expected shape {table.shape}, got {found.shape}; calibrate again"
                )


def counts_of(recorder: Recorder) -> Counts:
    """Counts of the size of a model, empty."""
    weight = recorder.gates[0].weight
    return Counts(len(recorder.gates), weight.shape[0], weight.shape[1])


def calibrate_batch(
    recorder: Recorder,
    counts: Counts,
    prompts: Sequence[Sequence[int]],
    n_decode: Sequence[int],
    seeds: Sequence[int],
    sampling: Sampling,
    on_tokens: Callable[[int], None] = lambda n: None,
) -> list[int]:
    """Count the requests of one batch."""
    recordings, captured, _ = recorder.batch(prompts, n_decode, seeds, sampling, Wanted(sums=True), on_tokens=on_tokens)
    for recording in recordings:
        counts.add(recording.experts, recording.n_prompt)
    assert captured.sums is not None
    counts.add_inputs(captured.sums)
    return [recording.n_decode for recording in recordings]
