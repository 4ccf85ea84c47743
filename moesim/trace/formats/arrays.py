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
    ROUTED,
    Format,
    Lacks,
    Options,
    Part,
    Probe,
    Store,
    archive_shapes,
    checked_ids,
    open_array,
    reading,
    wrong,
)  # fmt: skip
from moesim.trace.formats.records import known
from moesim.trace.formats.visits import complete_tokens, counted

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
        shapes, names = archive_shapes(path), dict[str, str]()
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
    dense = options.leading_dense(expert.shape[order[1]])
    expert = checked_ids(expert.transpose(order), place)[:, dense:]
    weight = found["weight"][1].transpose(order)[:, dense:] if "weight" in found else None
    n_rows, n_layers, _ = expert.shape
    meanings = {"step": "forward pass of each row", "phase": "0 prefill, 1 decode", "request": "request of each row",
                "position": "position of each row"}  # fmt: skip
    columns = {name: found.integers(name, n_rows, meaning) for name, meaning in meanings.items() if name in found}
    columns.pop("phase" if "step" in columns else "", None)
    request = columns.pop("request", found.of_offsets(n_rows))
    token = columns.pop("position", counted(request))
    part = complete_tokens(
        str(path), store, options.incomplete, expert.reshape(n_rows, -1),
        weights=None if weight is None else weight.reshape(n_rows, -1), request=request, n_layers=n_layers,
        token=token, layer=np.zeros(n_rows, np.int64), **columns,
    )  # fmt: skip
    facts: dict[str, Any] = {"requests": found.requests(len(part.lengths))} if "name" in found else {}
    facts |= {"dense_layers_left_out": dense} if dense else {}
    return replace(part, n_prompt=found.prompts(part), facts=facts)


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

    def of_offsets(self, n_rows: int) -> NDArray[np.int64]:
        """Return the request of each row by ``offsets``, or one request."""
        if "offsets" not in self:
            return np.zeros(n_rows, np.int64)
        place, array = self["offsets"]
        if array.ndim != 1 or not 2 <= len(array) <= n_rows + 1:
            raise wrong(place, f"shape (n,), first rows of up to {n_rows} requests and the end", array.shape)
        offsets = self.integers("offsets", len(array), "first row of each request")
        if offsets[0] != 0 or offsets[-1] != n_rows or (np.diff(offsets) < 1).any():
            raise wrong(place, f"ascending rows from 0 to {n_rows}", offsets[:8].tolist())
        return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))

    def prompts(self, part: Part) -> NDArray[np.int64] | None:
        if part.n_prompt is not None or "n_prompt" not in self:
            return part.n_prompt
        place, array = self["n_prompt"]
        if place.endswith("prompt_token_ids"):
            return np.array([len(expect(array, (None,), place, "the tokens of the prompt"))])
        self["n_prompt"] = place, np.atleast_1d(array)
        return self.integers("n_prompt", len(part.lengths), "prompt tokens of each request")

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
