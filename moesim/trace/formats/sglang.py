"""SGLang's responses with ``return_routed_experts``: base64 of int32.

Each is an object with ``meta_info``, or one whose ``choices`` have it. ``completion_tokens``, if there, is
compared: the last token generated is never run through the model, so there is one row less than tokens.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.formats.contract import Format, Lacks, Options, Part, Store, wrong
from moesim.trace.formats.records import documents

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FIELD = "meta_info.routed_experts"


def read(path: Path, options: Options, store: Store) -> Part:
    """Read all responses of a file."""
    if lacks := [name for name in ("n_layers", "top_k") if getattr(options, name) is None]:
        raise Lacks(path, lacks, "base64 without a shape", ["phase"])
    lengths, prompts = [], []
    for place, meta in _responses(path):
        counts = {key: meta[key] for key in ("prompt_tokens", "completion_tokens") if meta.get(key) is not None}
        for key, value in counts.items():
            if type(value) is not int or not 0 <= value < 2**31:
                raise wrong(f"{place}.{key}", "a number of tokens", repr(value)[:80])
        rows = _decode(
            f"{place}.routed_experts", meta["routed_experts"], sum(counts.values()) if len(counts) == 2 else None, options
        )
        prompt = counts.get("prompt_tokens")
        if prompt is not None and prompt > len(rows):
            raise wrong(place, f"at least the {prompt} rows of the prompt", len(rows))
        store.add(rows[:, options.leading_dense(rows.shape[1]) :], None, f"{place}.routed_experts")
        lengths.append(len(rows))
        prompts += [] if prompt is None else [prompt]
    if not lengths:
        raise wrong(path, f"responses with {_FIELD}", "none", "send return_routed_experts: true with the requests")
    if prompts and len(prompts) < len(lengths):
        raise wrong(path, "meta_info.prompt_tokens in all responses or in none", "a mixture")
    return Part(np.array(lengths, np.int64), np.array(prompts, np.int64) if prompts else None, bool(prompts))


def _decode(place: str, text: Any, total: int | None, options: Options) -> NDArray[np.int32]:
    if not isinstance(text, str):
        raise wrong(place, "base64 text", type(text).__name__, "export the response as it came")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise wrong(place, "base64", error, "it is truncated or altered") from None
    spec, n_layers, top_k = options.spec, options.n_layers or 0, options.top_k or 0
    if spec is not None and total is not None and n_layers == spec.n_layers:
        whole = n_layers + spec.n_dense_layers
        n_layers = whole if len(data) in {4 * whole * top_k * n for n in (total, total - 1)} else n_layers
    remedy = "check --n-layers (dense ones included) and --top-k"
    if not data or len(data) % (4 * n_layers * top_k):
        raise wrong(place, f"int32 for tokens x {n_layers} layers x {top_k} experts", f"{len(data)} bytes", remedy)
    rows = np.frombuffer(data, "<i4").reshape(-1, n_layers, top_k)
    if total is not None and len(rows) not in (total, total - 1):
        raise wrong(
            place, f"{total - 1} rows for {total} tokens", f"{len(rows)} with {n_layers} layers and top-{top_k}", remedy
        )  # fmt: skip
    return rows


def _responses(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each ``meta_info`` in the file, and the object."""
    for name, value in documents(path):
        for i, response in enumerate(value if isinstance(value, list) else [value]):
            here = f"{path}: {name}[{i}]" if isinstance(value, list) else f"{path}: {name}"
            choices = response.get("choices") if isinstance(response, dict) and "meta_info" not in response else None
            for j, answer in enumerate(choices if isinstance(choices, list) else [response]):
                inner = f"{here}.choices[{j}]" if isinstance(choices, list) else here
                meta = answer.get("meta_info") if isinstance(answer, dict) else None
                if not isinstance(meta, dict) or "routed_experts" not in meta:
                    remedy = (
                        "send return_routed_experts: true with the request, to a server that was started with "
                        "--enable-return-routed-experts"
                    )
                    raise wrong(f"{inner}.{_FIELD}", "base64 text", "nothing", remedy)
                yield f"{inner}.meta_info", meta


FORMAT = Format(
    "sglang",
    "responses of SGLang with meta_info.routed_experts: JSON, or one a line",
    lambda probe: probe.is_json and (b'"routed_experts"' in probe.head or b'"meta_info"' in probe.head),
    read,
    first_layer=True,
)
