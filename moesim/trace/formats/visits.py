"""From entries (token, layer, experts) in any order to complete tokens.

A token without one of the layers is left out, at the start of a request only: it becomes part of a prompt
whose routing was not recorded. Anywhere else it is a gap, which is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import check_made
from moesim.trace.formats.contract import NO_PHASE, Part, Store, checked_ids, checked_weights, wrong

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_N_PROMPT = "give --n-prompt with the tokens of each prompt, and no step"
_MAX_LAYERS = 2**12
_MAX_TOKEN = 2**31 - 1
_COLUMNS: dict[str, tuple[int, Any]] = {
    "layer": (_MAX_LAYERS - 1, np.uint16),
    "token": (_MAX_TOKEN, np.int32),
    "rank": (_MAX_LAYERS - 1, np.uint16),
    "phase": (1, np.uint8),
    "step": (_MAX_TOKEN, np.int32),
}
"""The highest value of each column of whole numbers, and how it is kept."""


def counted(*columns: NDArray[Any]) -> Ints:
    """Count the rows with the same values before each row."""
    import pandas as pd

    return np.asarray(pd.DataFrame(dict(enumerate(columns))).groupby(list(range(len(columns)))).cumcount(), np.int64)


def phases_of_steps(place: str, step: NDArray[Any], request: Ints) -> NDArray[np.uint8]:
    """Separate prompts from decoded tokens where each forward pass has a number."""
    begins = np.append(True, request[1:] != request[:-1])
    first = step[begins][np.cumsum(begins) - 1]
    again = ~begins & np.append(False, step[1:] == step[:-1])
    back = np.flatnonzero(~begins & np.append(False, step[1:] < step[:-1]))
    if len(back):
        row = int(back[0])
        raise wrong(f"{place}: request {request[row]}", f"a step of at least {step[row - 1]}", step[row], "steps count up")
    late = np.flatnonzero(again & (step != first))
    if len(late):
        row = int(late[0])
        got = f"several in step {step[row]}"
        raise wrong(f"{place}: request {request[row]}", "one token in each step after the first", got, _N_PROMPT)
    if not again.any() and len(step) > int(begins.sum()):
        expected = "a first step with the tokens of the prompt"
        raise wrong(f"{place}: step", expected, "one token in every step, so that it numbers tokens", _N_PROMPT)
    return np.asarray(step != first, np.uint8)


def complete_tokens(
    place: str,
    store: Store,
    incomplete: str,
    ids: NDArray[Any],
    *,
    weights: NDArray[Any] | None = None,
    request: NDArray[Any] | None = None,
    n_layers: int = 1,
    **columns: NDArray[Any],
) -> Part:
    """Put the complete tokens of a file into a store."""
    # An entry is an expert, (n,) ids, or all experts of a token in a layer, (n, top_k). Columns are `layer` and
    # `token`, and where known `rank`, `phase` (0 prefill, 1 decode) and `step` (the forward pass). Without a
    # request, a new one begins whenever the first token and layer come again. With `n_layers`, an entry has the
    # experts of all layers of a token.
    if not len(ids):
        raise wrong(place, "routing of at least one token", "none", "record it again")
    if weights is not None:
        if weights.shape != ids.shape:
            raise wrong(f"{place}: weight", f"shape {ids.shape[1:]} as the experts", weights.shape[1:])
        weights = checked_weights(weights, f"{place}: weight")
    ids = checked_ids(ids, f"{place}: expert")
    for name, (highest, dtype) in _COLUMNS.items():
        if name in columns:
            values = columns[name]
            bad = np.flatnonzero((values < 0) | (values > highest))
            if len(bad):
                remedy = NO_PHASE if name == "phase" else "export it again"
                raise wrong(f"{place}: {name} of row {bad[0]}", f"0..{highest}", values[bad[0]], remedy)
            columns[name] = values.astype(dtype)
    return _Grid(place, ids, request, columns).part(store, incomplete, weights, n_layers)


class _Grid:
    """The places (token, layer, rank) of one file, and which of them have entries."""

    def __init__(self, place: str, ids: NDArray[np.uint16], request: NDArray[Any] | None, columns: dict[str, Any]) -> None:
        import pandas as pd

        self.place, self.ids, self.columns = place, ids, columns
        self.width = ids.shape[1] if ids.ndim == 2 else 0
        layer, token = columns["layer"], columns["token"].astype(np.int64)
        of_entry = self._requests(layer, token) if request is None else pd.factorize(request)[0]  # as they come up
        spans = pd.Series(token).groupby(of_entry).agg(["min", "max"])
        self.low = spans["min"].to_numpy()
        self.lengths = spans["max"].to_numpy() - self.low + 1
        if self.lengths.sum() > len(ids):
            worst = int(np.argmax(self.lengths))
            expected = f"every position in {self.low[worst]}..{spans['max'][worst]}"
            remedy = "positions must have no gaps; if these are ids of words, leave the column out"
            raise wrong(f"{place}: request {worst}", expected, f"{len(ids)} entries in all", remedy)
        self.n_rows = int(self.lengths.sum())
        self.first = np.cumsum(self.lengths) - self.lengths
        self.request = np.repeat(np.arange(len(self.lengths)), self.lengths)  # of each row
        self.row = token + (self.first - self.low)[of_entry]
        self.layers, index = np.unique(layer, return_inverse=True)
        if self.n_rows * len(self.layers) > 4 * len(ids):
            expected = f"entries for {self.n_rows} tokens in {len(self.layers)} layers"
            raise wrong(place, expected, f"{len(ids)}", "most tokens lack most layers; check the columns")
        self.visit = self.row * len(self.layers) + index
        counts = np.bincount(self.visit, minlength=self.n_rows * len(self.layers))
        per_visit = 1 if self.width else int(counts.max())
        self.counts, self.top_k = counts.reshape(self.n_rows, -1), self.width or per_visit
        bad = np.flatnonzero((counts != per_visit) & (counts != 0))
        if len(bad):
            row, at = divmod(int(bad[0]), len(self.layers))
            got = f"{self.counts[row, at] * (self.width or 1)}"
            remedy = "each token and layer once, with the same number of experts; several requests need a column"
            raise wrong(self._name(row, at), f"{self.top_k} experts as elsewhere", got, remedy)

    def _requests(self, layer: NDArray[Any], token: Ints) -> Ints:
        again = (token == token[0]) & (layer == layer[0])
        if (rank := self.columns.get("rank")) is not None:
            again &= rank == rank[0]
        elif not self.width:  # the experts of one token and layer lie together
            again[1:] &= ~again[:-1]
        return np.cumsum(again) - 1

    def _name(self, row: int, layer: int) -> str:
        request = int(self.request[row])
        position = row - self.first[request] + self.low[request]
        return f"{self.place}: request {request}, position {position}, layer {self.layers[layer]}"

    def part(self, store: Store, incomplete: str, weights: NDArray[np.float16] | None, n_layers: int) -> Part:
        layers = np.arange(len(self.layers))
        notes: list[str] = []
        if incomplete == "layers":
            layers = np.flatnonzero((self.counts > 0).all(axis=0))
            if not len(layers):
                raise wrong(self.place, "a layer that all tokens have", "none", "leave out tokens instead")
            if len(layers) < len(self.layers):
                out = np.delete(self.layers, layers).tolist()
                notes.append(f"layers {out} left out: they are not recorded for all tokens")
        dropped, keep = self._drop(layers, notes)
        shape = (self.n_rows, len(self.layers), self.top_k)
        check_made(self.place, "expert ids of tokens", shape, 2, "import fewer requests at a time")
        if not self.width and len(empty := np.argwhere(~self._filled(shape)[keep][:, layers])):
            row, layer, rank = empty[0].tolist()
            place = self._name(int(np.flatnonzero(keep)[row]), int(layers[layer]))
            raise wrong(place, f"an expert of rank {rank}", "none, and another rank twice", "give each rank once")
        found = []
        for values in (self.ids, weights):
            if values is not None:
                grid = np.zeros(shape, values.dtype)
                if self.width:
                    grid.reshape(-1, self.top_k)[self.visit] = values
                else:
                    grid.reshape(-1)[self._places()] = values
                found.append(grid[keep][:, layers].reshape(int(keep.sum()), len(layers) * n_layers, -1))
        store.add(found[0], found[1] if weights is not None else None, self.place)
        named = self.layers[layers].tolist()
        facts: dict[str, Any] = {} if named == list(range(len(layers))) else {"layers": named}
        phases = self._phases(keep)
        return Part(
            self.lengths - dropped, phases, phases is not None, self.low + dropped, facts=facts, notes=tuple(notes)
        )  # fmt: skip

    def _drop(self, layers: Ints, notes: list[str]) -> tuple[Ints, NDArray[np.bool_]]:
        keep: NDArray[np.bool_] = np.asarray((self.counts[:, layers] > 0).all(axis=1))
        dropped = np.bincount(self.request[~keep], minlength=len(self.lengths))
        inside = ~keep & (np.arange(self.n_rows) - self.first[self.request] >= dropped[self.request])
        late = np.flatnonzero(inside | (~keep & (dropped == self.lengths)[self.request]))
        if late.tolist() == [self.n_rows - 1] and self.lengths[-1] > 1 and self.row[-1] == self.n_rows - 1:
            self.lengths[-1] -= 1
            dropped[-1] -= 1
            notes.append("the last token left out: the file ends before its last layer")
        elif len(late):
            row = int(late[0])
            layer = int(layers[np.argmax(self.counts[row, layers] == 0)])
            remedy = "only the first tokens of a request may be incomplete; the file is truncated or has gaps"
            raise wrong(self._name(row, layer), f"{self.top_k} experts", "none", remedy)
        if dropped.any():
            lacking = self.layers[layers][(self.counts[~keep][:, layers] == 0).any(axis=0)].tolist()
            out = f"{int(dropped.sum())} tokens at the start of requests left out"
            notes.append(f"{out}: layers {lacking} are not recorded for them")
        return np.asarray(dropped, np.int64), keep

    def _places(self) -> Ints:
        if (rank := self.columns.get("rank")) is None:
            rank = counted(self.visit)
        elif len(bad := np.flatnonzero(rank >= self.top_k)):
            place = f"{self.place}: rank of row {bad[0]}"
            raise wrong(place, f"0..{self.top_k - 1}", rank[bad[0]], "count ranks from 0")
        return np.asarray(self.visit * self.top_k + rank)

    def _filled(self, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        filled = np.zeros(shape, np.bool_)
        filled.reshape(-1)[self._places()] = True
        return filled

    def _phases(self, keep: NDArray[np.bool_]) -> Ints | None:
        name = next((name for name in ("phase", "step") if name in self.columns), None)
        if name is None:
            return None
        source = self.columns[name]
        phase = np.zeros(self.n_rows, source.dtype)
        phase[self.row] = source
        if len(differs := np.flatnonzero(phase[self.row] != source)):
            place = f"{self.place}: {name} of row {differs[0]}"
            raise wrong(place, f"one {name} for a token", "two", f"a token has one {name}")
        if name == "step":
            phase = phases_of_steps(self.place, phase, self.request)
        same = self.request[1:] == self.request[:-1]
        back = np.flatnonzero(same & keep[:-1] & (phase[1:] < phase[:-1]))
        if len(back):
            raise wrong(self._name(int(back[0]) + 1, 0), "decode after decode", "prefill", "the prompt comes first")
        return np.bincount(self.request[keep & (phase == 0)], minlength=len(self.lengths))
