"""The trace of an experiment: a file, or synthetic routing made for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesim.core.progress import Progress
from moesim.errors import ConfigError, TraceError
from moesim.trace import Trace, find_trace
from moesim.trace.made import read_made

GIVEN = "given:"
"""How the name of a trace begins that came from Python as an object."""


def name_of_given(trace: Trace) -> str:
    """Name a trace by its content."""
    return f"{GIVEN}{trace.digest[:16]}"


def read_trace(written: str | Mapping[str, Any], place: str) -> Trace:
    """Read a trace, or make one."""
    if isinstance(written, str):
        if written.startswith(GIVEN):
            raise TraceError(f"{place}: trace: expected the object {written} from Python, got none; run it from Python again")
        try:
            path = find_trace(written)
        except TraceError as error:
            raise TraceError(f"{place}: trace: {error}") from None
        return Trace.read(path)
    from moesim.trace.synthesis import read_parameters, synthesize  # SciPy takes most of a second to import

    made = read_made(written, place)
    try:
        with Progress(made.n_tokens) as bar:
            bar.describe(f"making up routing of {made.synthesize}")
            return synthesize(
                read_parameters(made.synthesize),
                n_requests=made.requests,
                n_prompt=made.prompt,
                n_decode=made.decode,
                seed=made.seed,
                scores=made.scores,
                progress=bar.advance,
            )
    except ConfigError as error:
        raise ConfigError(f"{place}: trace: {error}") from None
