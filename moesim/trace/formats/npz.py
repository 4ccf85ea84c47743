"""Plain NPZ: arrays that the user names with ``--column``.

==============  ======================================================================================================
``expert``      (n_rows, n_layers, top_k); needed
``weight``      the same shape
``offsets``     (n_requests + 1,): first row of each request, and the end
``request``     (n_rows,): request of each row, instead of ``offsets``; without either there is one request
``n_prompt``    (n_requests,): prompt tokens; ``--phase`` says whether their rows are there (both) or not (decode)
``phase``       (n_rows,): 0 prefill, 1 decode
``step``        (n_rows,), instead, if it is mapped: forward pass, of which the first of each request is its prompt
``position``    (n_rows,): place of the token in its request
``name``        (n_requests,): what to call them in the header
==============  ======================================================================================================
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.formats.contract import ROUTED, Format, Options, Part, Store, StoredArray, open_archive, wrong
from moesim.trace.formats.phases import REMEDY, phases_of_steps
from moesim.trace.formats.vllm import leading_dense

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesim.trace.formats.contract import Probe

#: Our names of arrays, and what they hold: a value for each row, or for each request.
NAMES = ("expert", "weight", "request", "position", "phase", "step", "offsets", "n_prompt", "name")
_MAX_NAME_BYTES = 4096


def matches(probe: Probe) -> bool:
    """Tell whether a file is an archive of arrays, one of them with three axes."""
    return any(len(array.shape) == 3 for array in probe.arrays.values()) and "routed_experts" not in probe.arrays


def read(path: Path, options: Options, store: Store) -> Part:
    """Read a file; see `Format`."""
    arrays = open_archive(path)
    found = {}
    for ours in NAMES:
        there = options.columns.get(ours, ours)
        if there in arrays and (ours != "step" or ours in options.columns):  # many things are called so
            found[ours] = arrays[there]
        elif ours in options.columns or ours == "expert":
            raise wrong(path, f"an array '{there}' for {ours}", sorted(arrays), f"map it with --column {ours}=NAME")
    expert = found["expert"].expect((None, None, None), ROUTED)
    if "weight" in found:
        found["weight"].expect(expert.shape, "as the experts")
    _store(expert, found.get("weight"), leading_dense(expert.shape[1], options), store)
    lengths = _lengths(found, expert.shape[0])
    n_prompt, phased = _prompts(found, lengths)
    name = found.get("name")
    facts: dict[str, Any] = {} if name is None else {"requests": _names(name, len(lengths))}
    return Part(lengths, n_prompt, phased, _offsets(found, lengths), facts=facts)


def _store(expert: StoredArray, weight: StoredArray | None, dense: int, store: Store) -> None:
    if weight is None:
        for first, rows in expert.pieces():
            store.add(rows[:, dense:], None, expert.place, first)
        return
    # Pieces of the two differ in length where their types do: take the weights as they are needed.
    others, ready = weight.pieces(), np.zeros((0, *weight.shape[1:]), weight.dtype)
    for first, rows in expert.pieces():
        while len(ready) < len(rows):
            ready = np.concatenate([ready, next(others)[1]])
        store.add(rows[:, dense:], ready[: len(rows), dense:], expert.place, first)
        ready = ready[len(rows) :]
    next(others, None)  # to the end, where its checksum is compared


def _integers(array: StoredArray, length: int, meaning: str) -> NDArray[np.int64]:
    if array.dtype.kind not in "iu":
        raise wrong(array.place, f"whole numbers, {meaning}", array.dtype.name)
    values = array.expect((length,), meaning).read()
    if (values < 0).any() or (values >= 2**31).any():
        row = int(np.flatnonzero((values < 0) | (values >= 2**31))[0])
        raise wrong(f"{array.place}[{row}]", f"0..{2**31 - 1}, {meaning}", values[row])
    return values.astype(np.int64)


def _lengths(found: dict[str, StoredArray], n_rows: int) -> NDArray[np.int64]:
    if "offsets" in found:
        array = found["offsets"]
        if len(array.shape) != 1 or not 2 <= array.shape[0] <= n_rows + 1:
            raise wrong(array.place, f"shape (n,), first rows of up to {n_rows} requests and the end", array.shape)
        offsets = _integers(array, array.shape[0], "first row of each request")
        if offsets[0] != 0 or offsets[-1] != n_rows or (np.diff(offsets) < 1).any():
            raise wrong(array.place, f"ascending rows from 0 to {n_rows}", offsets[:8].tolist())
        return np.diff(offsets)
    if "request" in found:
        array = found["request"]
        request = _integers(array, n_rows, "request of each row")
        starts = np.concatenate([[0], np.flatnonzero(np.diff(request)) + 1])
        if len(np.unique(request[starts])) < len(starts):
            raise wrong(array.place, "rows of a request together", "rows of one in two places", "sort them by request")
        return np.diff(np.append(starts, n_rows))
    return np.array([n_rows], np.int64)


def _prompts(found: dict[str, StoredArray], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64] | None, bool]:
    if "step" in found:
        place, step = found["step"].place, _integers(found["step"], int(lengths.sum()), "forward pass of each row")
        request = np.repeat(np.arange(len(lengths)), lengths)
        return np.bincount(request[phases_of_steps(place, step, request) == 0], minlength=len(lengths)), True
    if "phase" in found:
        place, phase = found["phase"].place, _integers(found["phase"], int(lengths.sum()), "0 prefill, 1 decode")
        request = np.repeat(np.arange(len(lengths)), lengths)
        bad = np.flatnonzero((phase > 1) | np.append(False, (np.diff(phase) < 0) & (np.diff(request) == 0)))
        if len(bad):
            raise wrong(f"{place}[{bad[0]}]", "0 (prefill), then 1 (decode) in each request", phase[bad[0]], REMEDY)
        return np.bincount(request[phase == 0], minlength=len(lengths)), True
    if "n_prompt" in found:
        return _integers(found["n_prompt"], len(lengths), "prompt tokens of each request"), False
    return None, False


def _offsets(found: dict[str, StoredArray], lengths: NDArray[np.int64]) -> NDArray[np.int64] | None:
    if "position" not in found:
        return None
    place, position = found["position"].place, _integers(found["position"], int(lengths.sum()), "position of each row")
    first = np.cumsum(lengths) - lengths
    expected = np.arange(len(position)) - np.repeat(first - position[first], lengths)
    bad = np.flatnonzero(position != expected)
    if len(bad):
        raise wrong(f"{place}[{bad[0]}]", f"{expected[bad[0]]}, one after the row before", position[bad[0]])
    return np.asarray(position[first])


def _names(array: StoredArray, n_requests: int) -> list[str]:
    if array.dtype.kind not in "US" or array.dtype.itemsize > _MAX_NAME_BYTES:
        raise wrong(array.place, "short texts", array.dtype)
    return [str(name) for name in array.expect((n_requests,), "a name for each request").read().tolist()]


FORMAT = Format(
    "npz", "plain NPZ with expert (tokens, layers, top_k), or arrays named with --column", matches, read, None, NAMES, True
)
