"""Which requests of a trace take part in a workload, and which of their rows; the rules are in `workload`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moesim.errors import WorkloadError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from moesim.trace import Trace
    from moesim.trace.workload.spec import WorkloadSpec

REUSE_SHIFTED = "reuse-shifted"
PROMPT_TRUNCATED = "prompt-truncated"
MAX_REQUESTS = 100_000
"""Of a workload, copies included."""


class Admitted(NamedTuple):
    """A request as it takes part in a workload."""

    request: int  # its number in the trace
    prompt_rows: NDArray[np.int64]  # rows of the trace, prefill
    decode_rows: NDArray[np.int64]  # rows of the trace, decode
    context: int  # tokens before the first of these rows

    @property
    def final_tokens(self) -> int:
        """Tokens in the KV cache once it has ended."""
        return self.context + len(self.prompt_rows) + len(self.decode_rows)


class _Recorded(NamedTuple):
    """What the trace holds of each request, (n_requests,) each."""

    first_row: NDArray[np.int64]
    n_prompt: NDArray[np.int64]
    n_decode: NDArray[np.int64]
    prompt_offset: NDArray[np.int64]  # prompt tokens before the first row, whose routing was not recorded
    covered: NDArray[np.bool_]  # by all signals that are needed

    @property
    def prompt(self) -> NDArray[np.int64]:
        return self.prompt_offset + self.n_prompt


def select(trace: Trace, spec: WorkloadSpec, require_signals: Collection[str]) -> tuple[list[Admitted], tuple[str, ...]]:
    """Choose requests and rows."""
    recorded = _read_table(trace, require_signals)
    exact, longer = _qualifying(recorded, spec)
    wrapped = False
    if spec.reuse == "shifted" and spec.requests is None and not (exact | longer).any():
        exact, wrapped = _repeatable(recorded, spec), True
    if spec.requests is None:
        order = _choose(exact, longer, spec)
        want = spec.size.requests
    elif spec.requests == "all":
        order = np.flatnonzero(exact | longer).tolist()
        want = max(1, len(order))
    else:
        assert isinstance(spec.requests, tuple)
        order = list(spec.requests)
        want = len(order)
        qualify = exact | longer | (_repeatable(recorded, spec) if spec.reuse == "shifted" else False)
        _check_named(order, qualify, recorded, spec, require_signals)
    if want > MAX_REQUESTS:
        raise WorkloadError(f"workload: expected at most {MAX_REQUESTS} requests, got {want}; lower batch_size or n_batches")
    if len(order) < want and not (spec.reuse == "shifted" and order):
        raise WorkloadError(_too_few(want, len(order), recorded, spec, require_signals))
    order = [order[i % len(order)] for i in range(want)]
    admitted = _cut(order, recorded, spec)
    long_enough = exact | longer
    shifted = wrapped or len(set(order)) < want or not all(long_enough[r] for r in order)
    truncated = spec.prompt_tokens is not None and bool((recorded.prompt[order] > spec.prompt_tokens).any())
    labels = ((PROMPT_TRUNCATED,) if truncated else ()) + ((REUSE_SHIFTED,) if shifted else ())
    return admitted, labels


def _read_table(trace: Trace, require_signals: Collection[str]) -> _Recorded:
    table = trace.requests
    for name in sorted(require_signals):
        if name not in trace.signals:
            raise WorkloadError(unknown_name("signal", name, trace.signals))
    wanted = frozenset(require_signals)
    covered = np.array([wanted.issubset(names) for names in table.signals], bool)
    return _Recorded(table.first_row, table.n_prompt, table.n_decode, table.prompt_offset, covered)


def _qualifying(r: _Recorded, spec: WorkloadSpec) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Find requests with a prompt as asked for, and with a longer one; both with enough decode rows."""
    decode = r.n_decode if spec.decode_tokens is None else spec.decode_tokens
    enough = r.covered & (r.n_decode >= decode) & (_used_prompt(r, spec) + decode > 0)
    if spec.prompt_tokens is None:
        return enough, np.zeros_like(enough)
    return enough & (r.prompt == spec.prompt_tokens), enough & (r.prompt > spec.prompt_tokens)


def _repeatable(r: _Recorded, spec: WorkloadSpec) -> NDArray[np.bool_]:
    """Find requests that will do if rows may repeat from the start."""
    has_decode = (r.n_decode > 0) | (spec.decode_tokens in (0, None))
    decode = 0 if spec.decode_tokens == 0 else r.n_decode
    result: NDArray[np.bool_] = r.covered & has_decode & (_used_prompt(r, spec) + decode > 0)
    return result


def _used_prompt(r: _Recorded, spec: WorkloadSpec) -> NDArray[np.int64]:
    """Count the recorded prompt rows that each request takes part with."""
    return r.n_prompt if spec.prompt_tokens is None else np.minimum(r.n_prompt, spec.prompt_tokens)


def _choose(exact: NDArray[np.bool_], longer: NDArray[np.bool_], spec: WorkloadSpec) -> list[int]:
    rng = np.random.default_rng(spec.seed)
    order = [int(r) for tier in (exact, longer) for r in rng.permutation(np.flatnonzero(tier))]
    return order[: spec.size.requests]


def _cut(order: Sequence[int], r: _Recorded, spec: WorkloadSpec) -> list[Admitted]:
    """Take the rows of each request; the copies of one are rotated against each other."""
    copies, seen = Counter(order), Counter[int]()
    admitted = []
    for request in order:
        copy, n_copies = seen[request], copies[request]
        seen[request] += 1
        n_prompt, n_decode = int(r.n_prompt[request]), int(r.n_decode[request])
        prompt = int(r.prompt[request]) if spec.prompt_tokens is None else spec.prompt_tokens
        decode = n_decode if spec.decode_tokens is None else spec.decode_tokens
        starts = n_decode if decode else n_prompt
        if n_copies > max(1, starts):
            raise WorkloadError(
                f"workload: expected at most {starts} copies of request {request}, which has no more rows "
                f"to start from, got {n_copies}; ask for fewer requests"
            )
        used = min(prompt, n_prompt)
        # Only rows that exist can repeat (prompt > recorded): without any, the prompt has just a length.
        n_prefill = prompt if n_prompt and prompt > int(r.prompt[request]) else used
        first_prompt = int(r.first_row[request]) + n_prompt - used
        admitted.append(
            Admitted(
                request,
                _rotated(first_prompt, used, n_prefill, copy, n_copies),
                _rotated(int(r.first_row[request]) + n_prompt, n_decode, decode, copy, n_copies),
                prompt - n_prefill,
            )
        )
    return admitted


def _rotated(first: int, n_recorded: int, n: int, copy: int, n_copies: int) -> NDArray[Any]:
    if not n:
        return np.zeros(0, np.int64)
    return first + (np.arange(n, dtype=np.int64) + copy * n_recorded // n_copies) % n_recorded


def _check_named(
    named: Sequence[int],
    qualify: NDArray[np.bool_],
    r: _Recorded,
    spec: WorkloadSpec,
    require_signals: Collection[str],
) -> None:
    for request in named:
        if not 0 <= request < len(qualify):
            raise WorkloadError(f"workload.requests: request {request} is not in the trace, which holds 0..{len(qualify) - 1}")
        if not qualify[request]:
            raise WorkloadError(
                f"workload.requests: request {request} has a prompt of {r.prompt[request]} and "
                f"{r.n_decode[request]} decode tokens; expected {_conditions(r, spec, require_signals)}"
            )


def _conditions(r: _Recorded, spec: WorkloadSpec, require_signals: Collection[str]) -> str:
    wanted = ["at least one row"]
    if spec.prompt_tokens is not None:
        wanted.append(f"a prompt of at least {spec.prompt_tokens} tokens")
    if spec.decode_tokens is not None:
        wanted.append(f"at least {spec.decode_tokens} decode tokens")
    if require_signals:
        names = ", ".join(sorted(require_signals))
        wanted.append(f"covered by signal {names}, as {int(r.covered.sum())} are")
    return ", ".join(wanted[1:] or wanted)


def _too_few(want: int, found: int, r: _Recorded, spec: WorkloadSpec, require_signals: Collection[str]) -> str:
    remedy = "ask for fewer or shorter ones" + ("" if spec.reuse else ", or set workload.reuse: shifted")
    return (
        f"workload: expected {want} distinct requests (batch_size {spec.batch_size} x n_batches "
        f"{spec.n_batches}), but {found} of the {len(r.prompt)} recorded qualify "
        f"({_conditions(r, spec, require_signals)}); the trace holds prompts of {_span(r.prompt)} and "
        f"decodes of {_span(r.n_decode)} tokens; {remedy}"
    )


def _span(values: NDArray[np.int64]) -> str:
    if not len(values):
        return "no"
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low}..{high}"
