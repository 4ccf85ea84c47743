"""Sorting the entries of a table into places (token, layer, rank), on disk; `visits` says what for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.files import mapped
from moesim.trace.formats.contract import Part, Spool, Store, pieces, wrong
from moesim.trace.formats.phases import phases_of_steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_LAYERS = 2**12
MAX_TOKEN = 2**31 - 1
_STEP = 2**20


class Grid:
    """The places (token, layer, rank) of one file, and what is in them."""

    def __init__(self, place: str, spool: Spool, n: int, width: int) -> None:
        self.place = place
        self.spool = spool
        self.n = n
        self.width = width
        self.layer, self.token = spool.column("layer"), spool.column("token")
        self._number_requests()
        self._number_layers()
        self._count()

    def _number_requests(self) -> None:
        """Number requests from 0 in the order in which they come up, and find the span of positions of each."""
        starts, values = self._runs()
        names, first, inverse = np.unique(values, return_index=True, return_inverse=True)
        order = np.empty(len(names), np.int64)
        order[np.argsort(first)] = np.arange(len(names))
        runs = order[inverse]
        low, high = np.full(len(names), MAX_TOKEN, np.int64), np.zeros(len(names), np.int64)
        np.minimum.at(low, runs, np.minimum.reduceat(self.token, starts).astype(np.int64))
        np.maximum.at(high, runs, np.maximum.reduceat(self.token, starts).astype(np.int64))
        self.low, self.lengths = low, high - low + 1
        worst = int(np.argmax(self.lengths))
        if self.lengths.sum() > self.n:
            expected = f"every position in {low[worst]}..{high[worst]}"
            raise wrong(f"{self.place}: request {worst}", expected, f"{self.n} entries in all", "positions must have no gaps")
        self.first = np.cumsum(self.lengths) - self.lengths
        self.n_rows = int(self.lengths.sum())
        shift = (self.first - low)[runs]
        for part in self._pieces():
            run = np.searchsorted(starts, np.arange(part.start, part.stop), side="right") - 1
            self.spool.append("row", (self.token[part] + shift[run]).astype(np.int32))
        self.row = self.spool.column("row")

    def _runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First entries of the stretches that belong to one request, and what says which request that is."""
        if "request" in self.spool:
            request = self.spool.column("request")
            starts = np.append(0, np.flatnonzero(request[1:] != request[:-1]) + 1)
            return starts, np.asarray(request[starts])
        again = (self.token == self.token[0]) & (self.layer == self.layer[0])
        if "rank" in self.spool:
            rank = self.spool.column("rank")
            again &= rank == rank[0]
        elif not self.width:  # the experts of one token and layer lie together
            again[1:] &= ~again[:-1]
        starts = np.flatnonzero(again)
        return starts, np.arange(len(starts))

    def _number_layers(self) -> None:
        present = np.zeros(MAX_LAYERS, bool)
        present[self.layer] = True
        self.layers = np.flatnonzero(present)
        self.index = np.cumsum(present) - 1
        n_places = self.n_rows * len(self.layers)
        if n_places > 4 * self.n:
            expected = f"entries for {self.n_rows} tokens in {len(self.layers)} layers"
            raise wrong(self.place, expected, f"{self.n}", "most tokens lack most layers; check the columns")

    def _pieces(self) -> list[slice]:
        return [slice(start, min(start + _STEP, self.n)) for start in range(0, self.n, _STEP)]

    def keys(self, part: slice) -> NDArray[np.int64]:
        """Number of the (token, layer) of each entry."""
        return np.asarray(self.row[part].astype(np.int64) * len(self.layers) + self.index[self.layer[part]])

    def _count(self) -> None:
        counts = np.zeros(self.n_rows * len(self.layers), np.int32)
        for part in self._pieces():
            _add_counts(counts, self.keys(part))
        self.counts = counts.reshape(self.n_rows, -1)
        per_place = 1 if self.width else int(counts.max())
        self.top_k = self.width or per_place
        bad = np.flatnonzero((counts != per_place) & (counts != 0))
        if len(bad):
            row, layer = divmod(int(bad[0]), len(self.layers))
            got = f"{self.counts[row, layer] * (self.width or 1)}"
            remedy = "each token and layer once, with the same number of experts; several requests need a column"
            raise wrong(self._name(row, layer), f"{self.top_k} experts as elsewhere", got, remedy)

    def _name(self, row: int, layer: int) -> str:
        request = int(np.searchsorted(self.first, row, side="right")) - 1
        position = row - self.first[request] + self.low[request]
        return f"{self.place}: request {request}, position {position}, layer {self.layers[layer]}"

    def store(self, store: Store, incomplete: str) -> Part:
        """Put complete tokens into a store."""
        layers = np.arange(len(self.layers))
        notes: list[str] = []
        if incomplete == "layers":
            layers = np.flatnonzero((self.counts > 0).all(axis=0))
            if not len(layers):
                raise wrong(self.place, "a layer that all tokens have", "none", "leave out tokens instead")
            if len(layers) < len(self.layers):
                out = [int(x) for x in np.delete(self.layers, layers)]
                notes.append(f"layers {out} left out: they are not recorded for all tokens")
        dropped, keep = self._drop(layers, notes)
        ids, weights = self._scatter()
        for start in range(0, self.n_rows, step := max(1, _STEP // self.counts.shape[1] // self.top_k)):
            chosen = np.flatnonzero(keep[start : start + step]) + start
            self._check_ranks(ids, chosen, layers)
            part = ids[chosen][:, layers]
            store.add(part, None if weights is None else weights[chosen][:, layers], self.place)
        facts: dict[str, Any] = {}
        if self.layers[layers].tolist() != list(range(len(layers))):
            facts["layers"] = self.layers[layers].tolist()
        phases = self._phases(keep)
        lengths = self.lengths - dropped
        offset = self.low + dropped
        return Part(lengths, phases, phases is not None, offset, facts=facts, notes=tuple(notes))

    def _drop(self, layers: NDArray[np.int64], notes: list[str]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Leave out tokens that lack a layer: how many of each request, and which rows are kept."""
        keep: NDArray[np.bool_] = np.asarray((self.counts[:, layers] > 0).all(axis=1))
        request = np.repeat(np.arange(len(self.lengths)), self.lengths)
        dropped = np.bincount(request[~keep], minlength=len(self.lengths))
        inside = ~keep & (np.arange(self.n_rows) - self.first[request] >= dropped[request])
        late = np.flatnonzero(inside | (~keep & (dropped == self.lengths)[request]))
        if len(late):
            row = int(late[0])
            layer = int(layers[np.argmax(self.counts[row, layers] == 0)])
            remedy = "only the first tokens of a request may be incomplete; the file is truncated or has gaps"
            raise wrong(self._name(row, layer), f"{self.top_k} experts", "none", remedy)
        if dropped.any():
            lacking = self.layers[layers][(self.counts[~keep][:, layers] == 0).any(axis=0)].tolist()
            notes.append(
                f"{int(dropped.sum())} tokens at the start of requests left out: layers {lacking} are not recorded for them"
            )
        return np.asarray(dropped, np.int64), keep

    def _scatter(self) -> tuple[NDArray[np.int32], NDArray[np.float16] | None]:
        """Bring the entries into the order of the grid, on disk."""
        shape = (self.n_rows, len(self.layers), self.top_k)
        folder = self.spool.folder
        with (folder / "grid_ids").open("w+b") as file:
            ids: NDArray[np.int32] = mapped(file, np.int32, shape)
        for piece in pieces(ids):
            piece[:] = -1
        source = self.spool.column("ids")
        weights, source_weights = None, None
        if "weights" in self.spool:
            with (folder / "grid_weights").open("w+b") as file:
                weights = mapped(file, np.float16, shape)
            source_weights = self.spool.column("weights")
        flat = ids.reshape(-1, self.width or 1)
        flat_weights = None if weights is None else weights.reshape(-1, self.width or 1)
        seen = np.zeros(self.counts.size, np.int32)
        for part in self._pieces():
            where = self._places(part, seen)
            flat[where] = source[part]
            if flat_weights is not None and source_weights is not None:
                flat_weights[where] = source_weights[part]
        return ids, weights

    def _places(self, part: slice, seen: NDArray[np.int32]) -> NDArray[np.int64]:
        keys = self.keys(part)
        if self.width:
            return keys
        if "rank" in self.spool:
            rank = self.spool.column("rank")[part].astype(np.int64)
            bad = np.flatnonzero(rank >= self.top_k)
            if len(bad):
                row = part.start + int(bad[0])
                raise wrong(f"{self.place}: rank of row {row}", f"0..{self.top_k - 1}", rank[bad[0]], "count ranks from 0")
        else:
            rank = _occurrence(keys) + seen[keys]
            _add_counts(seen, keys)
        return np.asarray(keys * self.top_k + rank)

    def _check_ranks(self, ids: NDArray[np.int32], rows: NDArray[np.int64], layers: NDArray[np.int64]) -> None:
        empty = np.argwhere(ids[rows][:, layers] < 0)
        if len(empty):
            row, layer, rank = empty[0].tolist()
            place = self._name(int(rows[row]), int(layers[layer]))
            raise wrong(place, f"an expert of rank {rank}", "none, and another rank twice", "give each rank once")

    def _phases(self, keep: NDArray[np.bool_]) -> NDArray[np.int64] | None:
        """Count the prefill rows of each request."""
        name = next((name for name in ("phase", "step") if name in self.spool), None)
        if name is None:
            return None
        request = np.repeat(np.arange(len(self.lengths)), self.lengths)
        phase = self._per_token(name)
        if name == "step":
            phase = phases_of_steps(self.place, phase, request)
        same = request[1:] == request[:-1]
        back = np.flatnonzero(same & keep[:-1] & (phase[1:] < phase[:-1]))
        if len(back):
            raise wrong(self._name(int(back[0]) + 1, 0), "decode after decode", "prefill", "the prompt comes first")
        return np.bincount(request[keep & (phase == 0)], minlength=len(self.lengths))

    def _per_token(self, name: str) -> NDArray[Any]:
        """Give a column by rows of the grid; its entries for one token must agree."""
        source = self.spool.column(name)
        values = np.zeros(self.n_rows, source.dtype)
        for part in self._pieces():
            values[self.row[part]] = source[part]
        for part in self._pieces():
            differs = np.flatnonzero(values[self.row[part]] != source[part])
            if len(differs):
                row = part.start + int(differs[0])
                raise wrong(f"{self.place}: {name} of row {row}", f"one {name} for a token", "two", f"a token has one {name}")
        return values


def _add_counts(counts: NDArray[np.int32], keys: NDArray[np.int64]) -> None:
    """Add 1 at each key; keys that lie close together, as nearly always, are counted many times faster."""
    low, high = int(keys.min()), int(keys.max()) + 1
    if high - low <= 8 * _STEP:
        counts[low:high] += np.bincount(keys - low, minlength=high - low).astype(np.int32)
    else:
        np.add.at(counts, keys, 1)


def _occurrence(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each key came before, in these."""
    ordered = bool((keys[1:] >= keys[:-1]).all())
    order = np.arange(len(keys)) if ordered else np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], sorted_keys[1:] != sorted_keys[:-1]]))
    lengths = np.diff(np.append(starts, len(keys)))
    result = np.empty(len(keys), np.int64)
    result[order] = np.arange(len(keys)) - np.repeat(starts, lengths)
    return result
