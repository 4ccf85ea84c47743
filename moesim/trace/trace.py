"""Traces: the experts that a model's routers chose for the tokens of some requests.

On disk a trace is one safetensors file: safe to load, memory-mapped, no pickle. Its arrays are

==========================  ==========================  =====================================================
``experts``                 uint8 or uint16             (n_rows, n_layers, top_k), in router-rank order
``weights``                 float16                     optional: same shape, as the model uses them
``request``, ``position``   int32                       (n_rows,): request; place of the token in it, from 0
``phase``                   uint8                       (n_rows,): 0 prefill, 1 decode
``scores``                  float16                     optional (n_rows, n_layers, n_experts): full softmax
``embeddings``              float16                     optional (n_rows, hidden): the model's, of each row's token
``inputs``, ``input_rows``  float16, int32              optional: what the routers read, see `GateInputs`
``signals/NAME``            float16                     optional: what a predictor said, see `Signal`
``signal_ids/NAME``         uint8 or uint16             the ids its scores belong to; absent when it is dense
``signal_rows/NAME``        int32                       (n,): the rows it covers
``calibration/NAME``        float                       optional (n_layers, ...): tables from other requests
==========================  ==========================  =====================================================
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.data import data_dirs
from moesim.core.table import Facts
from moesim.core.text import explain
from moesim.errors import TraceError, unknown_name
from moesim.trace.check import check_trace
from moesim.trace.files import arrays_of, full_header, read_file, write_file
from moesim.trace.format import SCHEMA_VERSION, checksums
from moesim.trace.parts import GateInputs, Recorded, Requests, Signal, made_up, remarks, tabulate
from moesim.trace.shards import MANIFEST, PARTS_SUFFIX, read_shards

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

SUFFIX = ".safetensors"


@dataclass(frozen=True, eq=False)
class Trace(Recorded, Facts):
    """Routing of a model on a workload.

    Attributes
    ----------
    experts : (n_rows, n_layers, top_k) uint8 or uint16
        Expert ids in router-rank order.
    weights : (n_rows, n_layers, top_k) float16 or None
        Gate weights as the model uses them; None if the source has none.
    request : (n_rows,) int32
        Request of each row, numbered from 0; the rows of one lie together in token order.
    position : (n_rows,) int32
        Place of the token in its request, from 0.
    phase : (n_rows,) uint8
        0 prefill, 1 decode.
    scores : (n_rows, n_layers, n_experts) float16 or None
        Full softmax of the router.
    embeddings : (n_rows, hidden) float16 or None
        The model's input embedding of each row's token, which identifies the token.
    inputs : GateInputs or None
        What the routers read, for some rows.
    signals : dict of str to Signal
        What predictors said, by name.
    tables : dict of str to ndarray, (n_layers, ...)
        Calibration: ``activation_frequency`` and ``activation_frequency_decode`` (n_layers, n_experts),
        shares that add up to 1 in a layer; ``coactivation`` (n_layers, n_experts, n_experts), rows that used
        i in l and j in l + 1; ``residual`` (n_layers, hidden); ``activation_matrices`` (n_layers, n_requests,
        n_experts), tokens of each request that used an expert; ``expert_maps`` (n_layers, n_iterations,
        n_experts), the scores (or weights of the chosen) of single iterations: of the last row of a prompt,
        and of each decoded token. From requests that are not in the trace.
    header : dict
        ``schema_version``, ``model``, ``n_layers``, ``n_experts``, ``top_k``, ``label`` (``measured`` or
        ``synthetic``) and where the trace comes from. ``signals`` and ``sha256`` are filled in when it is
        written.

    Examples
    --------
    >>> trace = Trace.build(
    ...     experts=np.array([[[2, 0]], [[1, 3]]], np.uint8), weights=np.full((2, 1, 2), 0.5), n_prompt=[1],
    ...     n_decode=[1], n_experts=4, model="tiny", label="synthetic",
    ... )
    >>> trace.n_layers, trace.top_k, trace.phase.tolist(), trace.requests.n_decode.tolist()
    (1, 2, [0, 1], [1])
    """

    @classmethod
    def build(
        cls,
        *,
        experts: NDArray[Any],
        weights: NDArray[Any] | None = None,
        n_prompt: Any,
        n_decode: Any,
        n_experts: int,
        model: str,
        label: str,
        prompt_offset: Any = 0,
        scores: NDArray[Any] | None = None,
        embeddings: NDArray[Any] | None = None,
        inputs: GateInputs | None = None,
        signals: Mapping[str, Signal] | None = None,
        tables: Mapping[str, NDArray[Any]] | None = None,
        header: Mapping[str, Any] | None = None,
    ) -> Trace:
        """Build a trace from routing and the lengths of its requests.

        Parameters
        ----------
        experts : (n_rows, n_layers, top_k) integer
            Rows of request 0 first, its prompt before its decode.
        weights : (n_rows, n_layers, top_k) float or None
        n_prompt, n_decode : (n_requests,) int
            Rows of each phase.
        n_experts : int
        model, label : str
            For the header.
        prompt_offset : int or (n_requests,) int
            Position of the first row of each request.
        scores, embeddings, inputs, signals, tables
            As the attributes of the class.
        header : mapping
            More for the header.

        Returns
        -------
        Trace

        Raises
        ------
        TraceError
            If something does not fit.
        """
        prompt, decode = np.asarray(n_prompt, np.int64), np.asarray(n_decode, np.int64)
        total = prompt + decode
        first = np.cumsum(total) - total
        request = np.repeat(np.arange(len(total), dtype=np.int32), total)
        place = np.arange(int(total.sum())) - first[request]
        shape = {"n_layers": experts.shape[1], "n_experts": n_experts, "top_k": experts.shape[2]}
        base = {"schema_version": SCHEMA_VERSION, "model": model, "label": label, **shape}
        offset = np.broadcast_to(np.asarray(prompt_offset, np.int64), total.shape)
        trace = cls(
            experts=np.asarray(experts, np.uint8 if n_experts <= 256 else np.uint16),
            weights=None if weights is None else np.asarray(weights, np.float16), request=request,
            position=(place + offset[request]).astype(np.int32),
            phase=(place >= prompt[request]).astype(np.uint8),
            scores=None if scores is None else np.asarray(scores, np.float16),
            embeddings=None if embeddings is None else np.asarray(embeddings, np.float16), inputs=inputs,
            signals=dict(signals or {}), tables=dict(tables or {}), header={**(header or {}), **base},
        )  # fmt: skip
        trace.check(f"trace of {model}")
        return trace

    @property
    def model(self) -> str:
        """Name of the model whose routers these are."""
        return str(self.header["model"])

    @property
    def label(self) -> str:
        """``measured`` or ``synthetic``."""
        return str(self.header["label"])

    @property
    def origin(self) -> str:
        """``synthetic``, ``recorded``, or ``miniature``: a small model with a large one's shape."""
        if self.label == "synthetic":
            return "synthetic"
        return "miniature" if self.header.get("miniature") else "recorded"

    @property
    def made_up(self) -> tuple[str, ...]:
        """Names among ``weights`` and ``scores`` that are uniform over the chosen experts."""
        return made_up(self.header)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Additions to the recorded routing, a few words each."""
        return remarks(self.header)

    @property
    def recorded_weights(self) -> NDArray[Any] | None:
        """The weights, unless they are made up."""
        return None if "weights" in self.made_up else self.weights

    @property
    def recorded_scores(self) -> NDArray[Any] | None:
        """The scores, unless they are made up."""
        return None if "scores" in self.made_up else self.scores

    @cached_property
    def prompt_offset(self) -> NDArray[np.int64]:
        """Position of the first recorded row of each request, (n_requests,) int64."""
        return self.requests.prompt_offset

    @cached_property
    def requests(self) -> Requests:
        """Where each request lies, how long it is, and which signals cover it."""
        return tabulate(self)

    @cached_property
    def digest(self) -> str:
        """sha256 of the content: header and arrays."""
        header = {**full_header(self), "sha256": checksums(arrays_of(self))}
        return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """Return the facts that a printed trace shows."""
        table = self.requests
        return {
            "routing of": self.model, "label": self.label, "layers": self.n_layers, "experts": self.n_experts,
            "top_k": self.top_k, "requests": self.n_requests,
            "prompt tokens": _span(table.prompt_offset + table.n_prompt),
            "decode tokens": _span(table.n_decode), "signals": list(self.signals), "tables": list(self.tables),
        }  # fmt: skip

    def has_signal(self, name: str, request: int) -> bool:
        """Return whether a signal covers a request, or its decode rows if it covers no prompt."""
        return name in self.requests.signals[request]

    def check(self, place: str = "trace") -> None:
        """Check types, shapes, ids, order and finiteness; raises `TraceError`."""
        check_trace(self, place)

    @classmethod
    def read(cls, path: str | Path, *, verify: bool = True) -> Trace:
        """Map a trace file into memory.

        Parameters
        ----------
        path : str or Path
            A file, or the folder of a recording that was interrupted; see `find_trace` for names.
        verify : bool
            Compare the arrays with the checksums of the header, and check their content. This reads the whole
            file.

        Returns
        -------
        Trace
            Its arrays are read-only views of the file.

        Raises
        ------
        TraceError
            If the file is missing, truncated, altered, of another version or inconsistent.
        """
        if Path(path).is_dir():
            return cls(**vars(read_shards(path)))
        return cls(**vars(read_file(path, verify=verify)))

    def write(self, path: str | Path, *, packed: bool = False) -> Path:
        """Write the trace to a file, completely or not at all, in reproducible bytes.

        Parameters
        ----------
        path : str or Path
            Where to. What is there is replaced.
        packed : bool
            Compress the arrays: a smaller file, which is read into memory instead of being mapped.

        Returns
        -------
        Path

        Raises
        ------
        TraceError
            If the trace is not valid.
        """
        return write_file(self, path, packed=packed)

    def to_frame(self) -> pd.DataFrame:
        """Return the routing as a long table.

        Returns
        -------
        pandas.DataFrame
            One row for each (token, layer, rank): request, position, phase (a category), layer, rank, expert,
            and weight if any.
        """
        import pandas as pd

        n_cells = self.n_layers * self.top_k
        phases = pd.Categorical.from_codes(
            np.repeat(self.phase, n_cells).astype(np.int8), categories=pd.Index(["prefill", "decode"])
        )
        frame = pd.DataFrame(
            {
                "request": np.repeat(self.request, n_cells),
                "position": np.repeat(self.position, n_cells),
                "phase": phases,
                "layer": np.tile(np.repeat(np.arange(self.n_layers, dtype=np.int16), self.top_k), self.n_rows),
                "rank": np.tile(np.arange(self.top_k, dtype=np.int16), self.n_rows * self.n_layers),
                "expert": self.experts.reshape(-1),
            }
        )
        if self.weights is not None:
            frame["weight"] = self.weights.reshape(-1).astype(np.float32)
        return frame


def _span(values: NDArray[Any]) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low}..{high}"


def find_trace(name_or_path: str | Path) -> Path:
    """Find a trace by name or path.

    Parameters
    ----------
    name_or_path : str or Path
        A path, or a name such as ``mini-mixtral``, which is looked for in ``./traces``, then next to the
        checkout, then in the installed package.

    Returns
    -------
    Path
        An existing file.

    Raises
    ------
    TraceError
        If there is none; with the names that are known.
    """
    text = str(name_or_path)
    if text.endswith((SUFFIX, PARTS_SUFFIX)) or "/" in text or "\\" in text:
        if not (Path(text).is_file() or (Path(text) / MANIFEST).is_file()):
            got = "a folder without a recording" if Path(text).is_dir() else "nothing there"
            where = "" if Path(text).is_absolute() else f", looked for from {Path.cwd()}"
            raise TraceError(f"{text}: expected a trace file, got {got}{where}; check the path")
        return Path(text)
    folders = data_dirs("traces")
    for folder in folders:
        if (folder / f"{text}{SUFFIX}").is_file():
            explain("trace %s: %s", text, folder / f"{text}{SUFFIX}")
            return folder / f"{text}{SUFFIX}"
    if Path(text).exists():
        raise TraceError(f"{text}: expected a trace, whose name ends in {SUFFIX}, got another file or folder; check the path")
    known = {path.stem for folder in folders for path in folder.glob(f"*{SUFFIX}")}
    raise TraceError(unknown_name("trace", text, known))


def trace_names() -> list[str]:
    """Return the names that `find_trace` knows, sorted."""
    return sorted({path.stem for folder in data_dirs("traces") for path in folder.glob(f"*{SUFFIX}")})
