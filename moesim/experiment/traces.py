"""The trace of an experiment: a file, or synthetic routing made for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesim.core.progress import Progress
from moesim.errors import ConfigError, TraceError, unknown_name
from moesim.trace import Trace, find_trace

MADE = "synthesize"  # the key that tells synthetic routing from a file
_LEAST = {"requests": 1, "prompt": 0, "decode": 0, "seed": 0}
MAX_TOKENS = 100_000
"""Of routing that is made up for an experiment: it is made anew each time, in memory, at 0.2 ms (DeepSeek-V2-Lite) to 0.7 ms
(Qwen3-30B-A3B) a token on one Zen 5 core."""


def trace_label(written: str | Mapping[str, Any]) -> str:
    """Name a trace in one word.

    >>> trace_label({"synthesize": "mixtral-8x7b", "requests": 4, "prompt": 256, "decode": 512})
    'synthetic-mixtral-8x7b-4x256+512-seed0'
    """
    if isinstance(written, str):
        return written
    shape = f"{written.get('requests', 1)}x{written.get('prompt', 0)}+{written.get('decode', 0)}"
    return f"synthetic-{written[MADE]}-{shape}-seed{written.get('seed', 0)}"


def read_trace(written: str | Mapping[str, Any], place: str) -> Trace:
    """Read a trace, or make one."""
    if isinstance(written, str):
        try:
            path = find_trace(written)
        except TraceError as error:
            raise TraceError(f"{place}: trace: {error}") from None
        return Trace.read(path)
    from moesim.trace.synthesis import read_parameters, synthesize  # SciPy takes most of a second to import

    counts = _counts(written, place)
    try:
        with Progress(counts["requests"] * (counts["prompt"] + counts["decode"])) as bar:
            bar.describe(f"making up routing of {written[MADE]}")
            return synthesize(
                read_parameters(written[MADE]),
                n_requests=counts["requests"],
                n_prompt=counts["prompt"],
                n_decode=counts["decode"],
                seed=counts["seed"],
                scores=bool(written.get("scores", False)),
                progress=bar.advance,
            )
    except ConfigError as error:
        raise ConfigError(f"{place}: trace: {error}") from None


def _counts(written: Mapping[str, Any], place: str) -> dict[str, int]:
    for key in written:
        if key not in (MADE, "scores", *_LEAST):
            raise ConfigError(f"{place}: trace: {unknown_name('key', str(key), [MADE, *_LEAST, 'scores'])}")
    if not isinstance(written[MADE], str):
        raise ConfigError(f"{place}: trace.{MADE}: expected the name of a parameter file, got {written[MADE]!r}")
    if not isinstance(written.get("scores", False), bool):
        raise ConfigError(f"{place}: trace.scores: expected true or false, got {written['scores']!r}")
    counts = {"requests": 1, "prompt": 0, "decode": 0, "seed": 0} | {k: v for k, v in written.items() if k in _LEAST}
    for key, least in _LEAST.items():
        value = counts[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{place}: trace.{key}: expected an integer of at least {least}, got {value!r}")
    n_tokens = counts["requests"] * (counts["prompt"] + counts["decode"])
    if n_tokens > MAX_TOKENS:
        raise ConfigError(
            f"{place}: trace: expected at most {MAX_TOKENS} tokens, got {n_tokens} (requests x (prompt + decode)); make that "
            "trace once, with moesim trace synthesize, and name its file"
        )
    return counts
