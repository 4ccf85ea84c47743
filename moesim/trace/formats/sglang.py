"""SGLang's responses with ``return_routed_experts``, base64 of int32; and the file of its recorder of experts.

Each response is an object with ``meta_info``, or one whose ``choices`` have it. ``completion_tokens``, if there, is
compared: the last token generated is never run through the model, so there is one row less than tokens.
"""

from __future__ import annotations

import base64
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import check_expansion
from moesim.trace.formats.contract import COUNTS, Format, Lacks, Options, Part, Store, reading, wrong
from moesim.trace.formats.records import documents

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FIELD = "meta_info.routed_experts"
_EXTEND, _DECODE = 1, 2
"""Kinds of passes that the recorder numbers."""


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


def load_recorded(path: Path) -> dict[str, Any]:
    """Read a file of the recorder."""
    try:
        import torch
    except ImportError:
        remedy = "install torch, or save the arrays with numpy.savez where it is"
        raise wrong(path, "PyTorch, to read a file that it wrote", "no module torch", remedy) from None
    with reading(path, "a file of SGLang's recorder"):
        with zipfile.ZipFile(path) as archive:
            check_expansion(path, sum(info.file_size for info in archive.infolist()), path.stat().st_size)
        loaded = torch.load(path, map_location="cpu", weights_only=True)  # tensors and plain values; it runs no code of the file
    return loaded if isinstance(loaded, dict) else {}


def read_recorded(path: Path, options: Options, store: Store) -> Part:
    """Read the passes of a file that the recorder wrote per token."""
    loaded = load_recorded(path)
    passes = loaded.get("records") or [{}]
    if any("topk_ids_of_layer" not in one for one in passes):
        raise wrong(path, "routes, of the recorder's mode per_token", "counts", COUNTS.format(path))
    with reading(path, "passes with positions, forward_mode and topk_ids_of_layer"):
        return _joined(path, loaded, passes, store)


def _joined(path: Path, loaded: dict[str, Any], passes: list[dict[str, Any]], store: Store) -> Part:
    """Join the passes of each request, which continues at its next position."""
    rows: list[list[tuple[int, NDArray[Any]]]] = []  # of each request: position, experts of all layers
    prompts: list[int] = []
    open_at: dict[int, tuple[int, int]] = {}  # request -> its next position, and the kind of its last pass
    logical = None if (known := loaded.get("last_physical_to_logical_map")) is None else np.asarray(known)
    for number, one in enumerate(sorted(passes, key=lambda one: one.get("forward_pass_id", 0))):
        place, mode, positions = f"{path}: pass {number}", one["forward_mode"], list(one["positions"])
        ids = np.asarray(one["topk_ids_of_layer"])
        if positions and mode not in (_EXTEND, _DECODE):
            raise wrong(place, "a prompt or a decode pass", f"forward_mode {mode}", "record without drafts and mixed chunks")
        if ids.ndim != 3 or ids.shape[1] < len(positions):
            raise wrong(place, f"experts (layers, {len(positions)} tokens, top_k)", ids.shape)
        if logical is not None:
            ids = np.where(ids < 0, ids, np.take_along_axis(logical[:, None], np.maximum(ids, 0), axis=-1))
        lengths = list(one["extend_seq_lens"]) if mode == _EXTEND else [1] * len(positions)
        if sum(lengths) != len(positions):
            raise wrong(place, f"{len(positions)} tokens of its requests", sum(lengths))
        at, going = 0, dict[int, tuple[int, int]]()
        for length in lengths:
            fits = [
                request for request, (expected, last) in open_at.items()
                if positions[at] == expected and request not in going and (mode == _DECODE or last == _EXTEND)
            ]  # fmt: skip
            if len(fits) > 1:
                remedy = "record one request at a time: --max-running-requests 1"
                raise wrong(place, "requests of one batch at different positions", f"several at {positions[at]}", remedy)
            request = fits[0] if fits and positions[at] else len(rows)
            if request == len(rows):
                rows.append([])
                prompts.append(0)
            rows[request] += [(positions[i], ids[:, i]) for i in range(at, at + length)]
            prompts[request] += length if mode == _EXTEND else 0
            at += length
            going[request] = positions[at - 1] + 1, mode
        open_at = going if mode == _DECODE and going else open_at | going  # a decode pass has all requests that go on
    if not any(rows):
        raise wrong(path, "routing of at least one token", "none", "record it again")
    experts = np.stack([ids for request in rows for _, ids in request])
    layers, ranks = (np.flatnonzero((experts >= 0).any(axis=axes)) for axes in ((0, 2), (0, 1)))  # others hold -1
    store.add(experts[:, layers][:, :, ranks], None, f"{path}: topk_ids_of_layer")
    sizes, first = (np.array(values, np.int64) for values in ([len(some) for some in rows], [some[0][0] for some in rows]))
    facts = {} if len(layers) == experts.shape[1] else {"layers": layers.tolist()}
    n_experts = None if logical is None else int(logical.max()) + 1
    return Part(sizes, np.array(prompts, np.int64), True, first, n_experts, facts=facts)


FORMAT = Format(
    "sglang",
    "responses of SGLang with meta_info.routed_experts: JSON, or one a line",
    lambda probe: probe.is_json and (b'"routed_experts"' in probe.head or b'"meta_info"' in probe.head),
    read,
    first_layer=True,
)
RECORDER = Format(
    "sglang-recorder",
    "the .pt file of SGLang's recorder of experts, mode per_token",
    lambda probe: b"data.pkl" in probe.head and any(key in probe.head for key in (b"forward_pass_id", b"logical_count")),
    read_recorded,
)
