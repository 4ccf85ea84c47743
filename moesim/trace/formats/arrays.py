"""Arrays of routing: vLLM's ``routed_experts``, and NPZ named by the user.

vLLM's rows are the tokens of the prompt and those generated but for the last, which is never run; dense
layers hold zeros. Arrays of an NPZ, which ``--column`` names:

==============  ============================================================================================
``expert``      (n_rows, n_layers, top_k); needed
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.formats.contract import (
    ARRAY,
    ROUTED,
    Format,
    Options,
    Part,
    Store,
    archive_shapes,
    open_array,
    reading,
    wrong,
)  # fmt: skip
from moesim.trace.formats.visits import REMEDY, phases_of_steps

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
    place, arrays = str(path), {}
    if path.suffix == ".npy":
        routed = open_array(path)
    else:
        shapes = archive_shapes(path)
        if _ROUTED_EXPERTS not in shapes:
            raise wrong(path, f"an array '{_ROUTED_EXPERTS}'", sorted(shapes), "read it as npz, with --column expert=NAME")
        arrays = read_archive(path, {_ROUTED_EXPERTS, "prompt_token_ids", "n_prompt"} & set(shapes))
        routed, place = arrays[_ROUTED_EXPERTS], f"{path}: {_ROUTED_EXPERTS}"
    dense = options.leading_dense(expect(routed, (None, None, None), place, ROUTED).shape[1])
    store.add(routed[:, dense:], None, place)
    n_prompt = _prompt(path, arrays)
    if n_prompt is not None and n_prompt > len(routed):
        raise wrong(place, f"at least the {n_prompt} tokens of the prompt", len(routed))
    return Part(
        np.array([len(routed)], np.int64),
        None if n_prompt is None else np.array([n_prompt], np.int64),
        n_prompt is not None,
        facts={"dense_layers_left_out": dense} if dense else {},
    )


def _prompt(path: Path, arrays: Arrays) -> int | None:
    if "prompt_token_ids" in arrays:
        place = f"{path}: prompt_token_ids"
        return len(expect(arrays["prompt_token_ids"], (None,), place, "the tokens of the prompt"))
    if (array := arrays.get("n_prompt")) is None:
        return None
    if array.shape not in ((), (1,)) or array.dtype.kind not in "iu":
        raise wrong(f"{path}: n_prompt", "one whole number", f"{array.dtype.name} {array.shape}")
    if array.item() < 0:
        raise wrong(f"{path}: n_prompt", "at least 0", array.item())
    return int(array.item())


def read_npz(path: Path, options: Options, store: Store) -> Part:
    """Read a file of named arrays."""
    shapes, names = archive_shapes(path), {}
    for ours in NAMES:
        there = options.columns.get(ours, ours)
        if there in shapes and (ours != "step" or ours in options.columns):  # many things are called so
            names[ours] = there
        elif ours in options.columns or ours == "expert":
            raise wrong(path, f"an array '{there}' for {ours}", sorted(shapes), f"map it with --column {ours}=NAME")
    members = read_archive(path, set(names.values()))
    found = _Named({ours: (f"{path}: {there}", members[there]) for ours, there in names.items()})
    expert = found.expect("expert", (None, None, None), ROUTED)
    weight = found.expect("weight", expert.shape, "as the experts") if "weight" in found else None
    dense = options.leading_dense(expert.shape[1])
    store.add(expert[:, dense:], None if weight is None else weight[:, dense:], found["expert"][0])
    lengths = found.lengths(len(expert))
    n_prompt, phased = found.prompts(lengths)
    facts: dict[str, Any] = {"requests": found.requests(len(lengths))} if "name" in found else {}
    return Part(lengths, n_prompt, phased, found.offsets(lengths), facts=facts)


class _Named(dict[str, "tuple[str, NDArray[Any]]"]):
    """Place and array by our name."""

    def expect(self, name: str, shape: tuple[int | None, ...], meaning: str) -> NDArray[Any]:
        place, array = self[name]
        return expect(array, shape, place, meaning)

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
                raise wrong(f"{place}[{bad[0]}]", "0 (prefill), then 1 (decode) in each request", phase[bad[0]], REMEDY)
        elif "n_prompt" in self:
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
    lambda probe: len(probe.shapes.get("", ())) == 3 or _ROUTED_EXPERTS in probe.shapes,
    read_vllm,
    first_layer=True,
)
NPZ = Format(
    "npz", "plain NPZ with expert (tokens, layers, top_k), or arrays named with --column",
    lambda probe: any(name and len(axes) == 3 for name, axes in probe.shapes.items()) and _ROUTED_EXPERTS not in probe.shapes,
    read_npz, None, NAMES, first_layer=True,
)  # fmt: skip
