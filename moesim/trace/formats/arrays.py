"""Arrays of routing: vLLM's ``routed_experts``, NPY, and NPZ named by the user.

vLLM's rows are the tokens of the prompt and those generated but for the last, which is never run; dense
layers hold zeros. Other arrays may have any order of axes. Arrays of an NPZ, which ``--column`` names:

==============  ============================================================================================
``expert``      (n_rows, n_layers, top_k), or these in the order of ``--axes``; needed
``weight``      the same shape
``offsets``     (n_requests + 1,): first row of each request, and the end
``request``     (n_rows,), instead of ``offsets``; without either there is one request
``n_prompt``    (n_requests,): ``--phase`` says whether prompts have rows (both) or not (decode)
``phase``       (n_rows,): 0 prefill, 1 decode; or ``step``, if mapped: the forward pass, prompt first
``position``    (n_rows,): place of the token in its request
``name``        (n_requests,): for the header
==============  ============================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.formats.contract import (
    ARRAY,
    AXES,
    NO_PHASE,
    ROUTED,
    Format,
    Lacks,
    Options,
    Part,
    Probe,
    Store,
    archive_shapes,
    open_array,
    reading,
    wrong,
)  # fmt: skip
from moesim.trace.formats.records import known
from moesim.trace.formats.visits import phases_of_steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

_ROUTED_EXPERTS = "routed_experts"
#: Our names of arrays, and what they hold: a value for each row, or for each request.
NAMES = ("expert", "weight", "request", "position", "phase", "step", "offsets", "n_prompt", "name")
_MAX_NAME_BYTES = 4096


def read_archive(path: Path, names: Iterable[str]) -> Arrays:
    """Read some arrays of a ``.npz`` file as a whole."""
    with reading(path, ARRAY), np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in names}


def expect(array: NDArray[Any], shape: tuple[int | None, ...], place: str, meaning: str) -> NDArray[Any]:
    """Check the shape of an array; None stands for any positive length."""
    fits = len(shape) == array.ndim and all(
        have >= 1 if want is None else have == want for have, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        text = ", ".join("n" if want is None else str(want) for want in shape)
        remedy = "name another array, or the format" if ": " in place else "save it with these axes"
        raise wrong(place, f"shape ({text}), {meaning}", array.shape, remedy)
    return array


def read_vllm(path: Path, options: Options, store: Store) -> Part:
    """Read one request of vLLM."""
    prompt = "prompt_token_ids" if "prompt_token_ids" in Probe(path).shapes else "n_prompt"
    columns = {"expert": _ROUTED_EXPERTS, "n_prompt": prompt} if prompt in Probe(path).shapes else {"expert": _ROUTED_EXPERTS}
    part = read_npz(path, replace(options, axes=AXES, columns=columns), store)
    if part.n_prompt is not None and part.n_prompt[0] > part.lengths[0]:
        raise wrong(path, f"at least the {part.n_prompt[0]} tokens of the prompt", part.lengths[0])
    return replace(part, phased=part.n_prompt is not None)


def axes_of(array: NDArray[Any], place: str, options: Options, n_rows: int | None, says: Iterable[str] = ()) -> tuple[int, ...]:
    """Return where tokens, layers and ids are: as it was stated, or the only order that fits."""
    expect(array, (None, None, None), place, ROUTED)
    sample = np.asarray(array[:256, :256, :256])
    spec, layers = options.spec, set[int]()
    if options.n_layers is not None:
        layers = {options.n_layers, options.n_layers + (spec.n_dense_layers if spec else options.first_layer or 0)}
    fits = []
    for order in [options.axes] if options.axes else permutations(AXES):
        tokens, layer, ids = (order.index(axis) for axis in AXES)
        n_tokens, n_layers = array.shape[tokens], array.shape[layer]
        repeats = (np.diff(np.sort(sample, axis=ids), axis=ids) == 0) & sample.any(axis=ids, keepdims=True)  # zeros: dense layers
        distinct = not repeats.any()  # a token never uses an expert twice
        if options.axes or (distinct and n_rows in (None, n_tokens) and (not layers or n_layers in layers)):
            fits.append((tokens, layer, ids))
    if len(fits) != 1:
        raise Lacks(place, ["axes"], f"shape {array.shape}, which fits {len(fits) or 'no'} orders", list(says))
    return fits[0]


def read_npz(path: Path, options: Options, store: Store) -> Part:
    """Read a file of named arrays, or of one."""
    if Probe(path).head.startswith(b"\x93NUMPY"):
        found = _Named({"expert": (str(path), open_array(path))})
    else:
        shapes, names = archive_shapes(path), {}
        others = known(tuple(name for name, axes in shapes.items() if len(axes) == 3))
        for ours in NAMES:
            like = [name for name in others.get(ours, ()) if shapes[name] == shapes[names.get("expert", name)]]
            there = options.columns.get(ours, like[0] if like else ours)
            if there in shapes and (ours != "step" or ours in options.columns):  # many things are called so
                names[ours] = there
            elif ours in options.columns or ours == "expert":
                raise wrong(path, f"an array '{there}' for {ours}", sorted(shapes), f"map it with --column {ours}=NAME")
        members = read_archive(path, set(names.values()))
        found = _Named({ours: (f"{path}: {there}", members[there]) for ours, there in names.items()})
    place, expert = found["expert"]
    if "weight" in found:
        found.expect("weight", expert.shape, "as the experts")
    order = axes_of(expert, place, options, found.n_rows(), {"phase"} & set(found))
    expert = expert.transpose(order)
    weight = found["weight"][1].transpose(order) if "weight" in found else None
    dense = options.leading_dense(expert.shape[1])
    store.add(expert[:, dense:], None if weight is None else weight[:, dense:], place)
    lengths = found.lengths(len(expert))
    n_prompt, phased = found.prompts(lengths)
    facts: dict[str, Any] = {"requests": found.requests(len(lengths))} if "name" in found else {}
    facts |= {"dense_layers_left_out": dense} if dense else {}
    return Part(lengths, n_prompt, phased, found.offsets(lengths), facts=facts)


class _Named(dict[str, "tuple[str, NDArray[Any]]"]):
    """Place and array by our name."""

    def expect(self, name: str, shape: tuple[int | None, ...], meaning: str) -> NDArray[Any]:
        place, array = self[name]
        return expect(array, shape, place, meaning)

    def n_rows(self) -> int | None:
        """Return the number of tokens that the other arrays tell."""
        for name in ("request", "phase", "position", "step"):
            if name in self:
                return len(self[name][1]) if self[name][1].ndim == 1 else None
        offsets = self["offsets"][1] if "offsets" in self else np.zeros(0)
        return int(offsets[-1]) if offsets.ndim == 1 and len(offsets) and offsets.dtype.kind in "iu" else None

    def integers(self, name: str, length: int, meaning: str) -> NDArray[np.int64]:
        place, array = self[name]
        if array.dtype.kind not in "iu":
            raise wrong(place, f"whole numbers, {meaning}", array.dtype.name)
        values = expect(array, (length,), place, meaning)
        bad = np.flatnonzero((values < 0) | (values >= 2**31))
        if len(bad):
            raise wrong(f"{place}[{bad[0]}]", f"0..{2**31 - 1}, {meaning}", values[bad[0]])
        return values.astype(np.int64)

    def lengths(self, n_rows: int) -> NDArray[np.int64]:
        if "offsets" in self:
            place, array = self["offsets"]
            if array.ndim != 1 or not 2 <= len(array) <= n_rows + 1:
                raise wrong(place, f"shape (n,), first rows of up to {n_rows} requests and the end", array.shape)
            offsets = self.integers("offsets", len(array), "first row of each request")
            if offsets[0] != 0 or offsets[-1] != n_rows or (np.diff(offsets) < 1).any():
                raise wrong(place, f"ascending rows from 0 to {n_rows}", offsets[:8].tolist())
            return np.diff(offsets)
        if "request" in self:
            request = self.integers("request", n_rows, "request of each row")
            starts = np.concatenate([[0], np.flatnonzero(np.diff(request)) + 1])
            if len(np.unique(request[starts])) < len(starts):
                got = "rows of one in two places"
                raise wrong(self["request"][0], "rows of a request together", got, "sort them by request")
            return np.diff(np.append(starts, n_rows))
        return np.array([n_rows], np.int64)

    def prompts(self, lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64] | None, bool]:
        request, n_rows = np.repeat(np.arange(len(lengths)), lengths), int(lengths.sum())
        if "step" in self:
            step = self.integers("step", n_rows, "forward pass of each row")
            phase: NDArray[Any] = phases_of_steps(self["step"][0], step, request)
        elif "phase" in self:
            place, phase = self["phase"][0], self.integers("phase", n_rows, "0 prefill, 1 decode")
            bad = np.flatnonzero((phase > 1) | np.append(False, (np.diff(phase) < 0) & (np.diff(request) == 0)))
            if len(bad):
                raise wrong(f"{place}[{bad[0]}]", "0 (prefill), then 1 (decode) in each request", phase[bad[0]], NO_PHASE)
        elif "n_prompt" in self:
            place, array = self["n_prompt"]
            if place.endswith("prompt_token_ids"):
                return np.array([len(expect(array, (None,), place, "the tokens of the prompt"))]), False
            self["n_prompt"] = place, np.atleast_1d(array)
            return self.integers("n_prompt", len(lengths), "prompt tokens of each request"), False
        else:
            return None, False
        return np.bincount(request[phase == 0], minlength=len(lengths)), True

    def offsets(self, lengths: NDArray[np.int64]) -> NDArray[np.int64] | None:
        if "position" not in self:
            return None
        position = self.integers("position", int(lengths.sum()), "position of each row")
        first = np.cumsum(lengths) - lengths
        expected = np.arange(len(position)) - np.repeat(first - position[first], lengths)
        bad = np.flatnonzero(position != expected)
        if len(bad):
            place = f"{self['position'][0]}[{bad[0]}]"
            raise wrong(place, f"{expected[bad[0]]}, one after the row before", position[bad[0]])
        return np.asarray(position[first])

    def requests(self, n_requests: int) -> list[str]:
        place, array = self["name"]
        if array.dtype.kind not in "US" or array.dtype.itemsize > _MAX_NAME_BYTES:
            raise wrong(place, "short texts", array.dtype)
        return [str(name) for name in self.expect("name", (n_requests,), "a name for each request").tolist()]


VLLM = Format(
    "vllm",
    "routed_experts (tokens, layers, top_k) of vLLM: npy, npz, one request a file",
    lambda probe: _ROUTED_EXPERTS in probe.shapes,
    read_vllm,
    first_layer=True,
)
NPZ = Format(
    "npz", "an array of three axes in any order: npy, or npz with expert or arrays named with --column",
    lambda probe: any(len(axes) == 3 for axes in probe.shapes.values()) and _ROUTED_EXPERTS not in probe.shapes,
    read_npz, None, NAMES, first_layer=True,
)  # fmt: skip
