"""From entries (token, layer, experts) in any order to complete tokens.

Engines write what they do: in prefill a layer for all tokens, then the next layer; in decode a token through all
layers. So entries are sorted by what they say, not by where they stand. What is missing stays missing: a token
without one of the layers is left out, and counted, and that is possible at the start of a request only, where the
tokens left out become a prompt whose routing was not recorded. Anywhere else it is a gap, which is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from moesim.trace.formats.contract import Part, Spool, Store, checked_ids, checked_weights, wrong
from moesim.trace.formats.grid import MAX_LAYERS, MAX_TOKEN, Grid
from moesim.trace.formats.phases import REMEDY

if TYPE_CHECKING:
    from numpy.typing import NDArray


_COLUMNS: dict[str, tuple[int, Any]] = {
    "layer": (MAX_LAYERS - 1, np.uint16),
    "token": (MAX_TOKEN, np.int32),
    "rank": (MAX_LAYERS - 1, np.uint16),
    "phase": (1, np.uint8),
    "step": (MAX_TOKEN, np.int32),
}
"""The highest value of each column of whole numbers, and how it is kept."""


class Visits:
    """Entries of one file; to be used in a ``with`` block."""

    def __init__(self, place: str, store: Store) -> None:
        self._place = place
        self._store = store
        self._spool = Spool(store.scratch())
        self._n = 0
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._spool.close()

    def add(
        self,
        ids: NDArray[Any],
        layer: NDArray[Any],
        token: NDArray[Any],
        *,
        weights: NDArray[Any] | None = None,
        request: NDArray[Any] | None = None,
        **columns: NDArray[Any],
    ) -> None:
        """Add entries, with columns of `_COLUMNS`; a column is given with all of them or with none."""
        if self._n and ids.ndim == 2 and ids.shape[1] != self._width:
            expected = f"{self._width} experts as in the rows before"
            remedy = "every token uses the same number of experts"
            raise wrong(f"{self._place}: row {self._n}", expected, f"{ids.shape[1]}", remedy)
        self._width = ids.shape[1] if ids.ndim == 2 else 0
        self._spool.append("ids", checked_ids(ids, f"{self._place}: expert", self._n).reshape(len(ids), -1))
        if weights is not None:
            if weights.shape != ids.shape:
                raise wrong(f"{self._place}: weight", f"shape {ids.shape[1:]} as the experts", weights.shape[1:])
            self._spool.append("weights", checked_weights(weights, f"{self._place}: weight", self._n).reshape(len(ids), -1))
        if request is not None:
            self._spool.append("request", np.asarray(request, np.int64))
        given = {"layer": layer, "token": token, **columns}
        for name, (highest, dtype) in _COLUMNS.items():
            if name in given:
                self._append(name, given[name], highest, dtype)
        self._n += len(ids)

    def _append(self, name: str, values: NDArray[Any], highest: int, dtype: Any) -> None:
        bad = np.flatnonzero((values < 0) | (values > highest))
        if len(bad):
            row = int(bad[0])
            remedy = REMEDY if name == "phase" else "export it again"
            raise wrong(f"{self._place}: {name} of row {self._n + row}", f"0..{highest}", values[row], remedy)
        self._spool.append(name, values.astype(dtype))

    def finish(self, incomplete: str = "tokens") -> Part:
        """Put complete tokens into the store."""
        if not self._n:
            raise wrong(self._place, "routing of at least one token", "none", "record it again")
        return Grid(self._place, self._spool, self._n, self._width).store(self._store, incomplete)
