"""vLLM's ``routed_experts``: an array (tokens, layers, top_k) for each request.

A ``.npy`` with that array alone, or a ``.npz`` with it under its name; several files, or a folder of them, are
several requests. Rows are the tokens of the prompt and then those generated, but for the last, which is never
run through the model. The ``.npz`` may say how long the prompt is: ``prompt_token_ids`` (n,), or one number
``n_prompt``. There are no weights. The layers are all of the model's; those that are dense hold zeros.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moesim.trace.formats.contract import (
    ROUTED,
    Format,
    Options,
    Part,
    Probe,
    Store,
    StoredArray,
    open_archive,
    open_array,
    wrong,
)

_NAME = "routed_experts"


def matches(probe: Probe) -> bool:
    """Tell whether a file is an array of three axes, or an archive with ``routed_experts``."""
    return (probe.array is not None and len(probe.array.shape) == 3) or _NAME in probe.arrays


def read(path: Path, options: Options, store: Store) -> Part:
    """Read one request; see `Format`."""
    arrays = {_NAME: open_array(path)} if path.suffix == ".npy" else open_archive(path)
    if _NAME not in arrays:
        raise wrong(path, f"an array '{_NAME}'", sorted(arrays), "read it as npz, with --column expert=NAME")
    routed = arrays[_NAME].expect((None, None, None), ROUTED)
    dense = leading_dense(routed.shape[1], options)
    for first, rows in routed.pieces():
        store.add(rows[:, dense:], None, routed.place, first)
    n_prompt = _prompt(arrays)
    if n_prompt is not None and n_prompt > routed.shape[0]:
        raise wrong(routed.place, f"at least the {n_prompt} tokens of the prompt", routed.shape[0])
    return Part(
        np.array([routed.shape[0]], np.int64),
        None if n_prompt is None else np.array([n_prompt], np.int64),
        n_prompt is not None,
        facts={"dense_layers_left_out": dense} if dense else {},
    )


def leading_dense(n_layers: int, options: Options) -> int:
    """Leading layers of an array that are dense: as the user said, or as the model's shape says if that explains their number."""
    if options.first_layer is not None:
        if options.first_layer >= n_layers:
            raise wrong(
                "--first-layer", f"less than the {n_layers} layers of the array", options.first_layer, "layers count from 0"
            )
        return options.first_layer
    spec = options.spec
    return spec.n_dense_layers if spec is not None and n_layers == spec.n_layers + spec.n_dense_layers else 0


def _prompt(arrays: dict[str, StoredArray]) -> int | None:
    if "prompt_token_ids" in arrays:
        return arrays["prompt_token_ids"].expect((None,), "the tokens of the prompt").shape[0]
    if "n_prompt" in arrays:
        array = arrays["n_prompt"]
        if array.shape not in ((), (1,)) or array.dtype.kind not in "iu":
            raise wrong(array.place, "one whole number", f"{array.dtype.name} {array.shape}")
        value = int(array.read().reshape(-1)[0])
        if value < 0:
            raise wrong(array.place, "at least 0", value)
        return value
    return None


FORMAT = Format(
    "vllm", "routed_experts (tokens, layers, top_k) of vLLM: npy, npz, one request a file", matches, read, first_layer=True
)
