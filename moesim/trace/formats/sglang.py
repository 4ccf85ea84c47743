"""SGLang's responses with ``return_routed_experts``: base64 of int32.

Each is an object with ``meta_info``, or one whose ``choices`` have it. ``completion_tokens``, if there, is
compared: the last token generated is never run through the model, so there is one row less than tokens.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moesim.core.gate import ANSWERS, SMALLER, TooLargeError, lines, read_bytes
from moesim.trace.formats.contract import Format, Options, Part, Store, wrong

_FIELD = "meta_info.routed_experts"


def read(path: Path, options: Options, store: Store) -> Part:
    """Read all responses of a file."""
    if options.n_layers is None or options.top_k is None:
        remedy = "give --n-layers (dense ones included) and --top-k, or the --model's name"
        raise wrong(path, "the number of layers and top_k", "base64 without a shape", options.shape_remedy(remedy))
    lengths, prompts = [], []
    for name, meta in _responses(path):
        rows = _decode(f"{path}: {name}{_FIELD}", meta, options)
        prompt = _count(f"{path}: {name}meta_info.prompt_tokens", meta.get("prompt_tokens"))
        if prompt is not None and prompt > len(rows):
            raise wrong(f"{path}: {name}meta_info", f"at least the {prompt} rows of the prompt", len(rows))
        dense = options.leading_dense(rows.shape[1])
        store.add(rows[:, dense:], None, f"{path}: {name}{_FIELD}")
        lengths.append(len(rows))
        prompts.append(prompt)
    if not lengths:
        raise wrong(path, f"responses with {_FIELD}", "none", "send return_routed_experts: true with the requests")
    known = [p for p in prompts if p is not None]
    if known and len(known) < len(prompts):
        raise wrong(path, "meta_info.prompt_tokens in all responses or in none", "a mixture")
    n_prompt = np.array(known, np.int64) if known else None
    return Part(np.array(lengths, np.int64), n_prompt, bool(known))


def _decode(place: str, meta: dict[str, Any], options: Options) -> Any:
    text = meta["routed_experts"]
    if not isinstance(text, str):
        raise wrong(place, "base64 text", type(text).__name__, "export the response as it came")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise wrong(place, "base64", error, "it is truncated or altered") from None
    n_layers, top_k = _layers(len(data), meta, options, place), options.top_k or 0
    if not data or len(data) % (4 * n_layers * top_k):
        expected = f"int32 for tokens x {n_layers} layers x {top_k} experts"
        raise wrong(place, expected, f"{len(data)} bytes", "check --n-layers (dense ones included) and --top-k")
    rows = np.frombuffer(data, "<i4").reshape(-1, n_layers, top_k)
    total = _tokens(place, meta)
    if total is not None and len(rows) not in (total, total - 1):
        got = f"{len(rows)} with {n_layers} layers and top-{top_k}"
        raise wrong(place, f"{total - 1} rows for {total} tokens", got, "check --n-layers (dense ones included) and --top-k")
    return rows


def _tokens(place: str, meta: dict[str, Any]) -> int | None:
    counts = [_count(f"{place}: {key}", meta.get(key)) for key in ("prompt_tokens", "completion_tokens")]
    return None if None in counts else sum(count for count in counts if count is not None)


def _layers(n_bytes: int, meta: dict[str, Any], options: Options, place: str) -> int:
    n_layers, spec = options.n_layers or 0, options.spec
    total = _tokens(place, meta)
    if spec is None or total is None or n_layers != spec.n_layers or not spec.n_dense_layers:
        return n_layers
    whole = n_layers + spec.n_dense_layers
    fits = n_bytes in {4 * whole * (options.top_k or 0) * n for n in (total, total - 1)}
    return whole if fits else n_layers


def _count(place: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise wrong(place, "a number of tokens", repr(value)[:80])
    return value


def _responses(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each ``meta_info`` in the file, and the object."""
    for name, value in _documents(path):
        for i, response in enumerate(value if isinstance(value, list) else [value]):
            here = f"{name}[{i}]." if isinstance(value, list) else f"{name}."
            if not isinstance(response, dict):
                raise wrong(f"{path}: {here[:-1]}", "a response, a JSON object", type(response).__name__)
            choices = response.get("choices")
            if isinstance(choices, list) and "meta_info" not in response:
                yield from ((f"{here}choices[{j}].", _meta(path, here, choice)) for j, choice in enumerate(choices))
            else:
                yield here, _meta(path, here, response)


def _meta(path: Path, here: str, response: Any) -> dict[str, Any]:
    meta = response.get("meta_info") if isinstance(response, dict) else None
    if not isinstance(meta, dict) or "routed_experts" not in meta:
        remedy = (
            "send return_routed_experts: true with the request, to a server that was started with --enable-return-routed-experts"
        )
        raise wrong(f"{path}: {here}{_FIELD}", "base64 text", "nothing", remedy)
    return meta


def _documents(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as file:
            yield from _parsed(path, lines(file, ANSWERS))
    except TooLargeError as error:
        raise wrong(path, "JSON, one document or one a line", error.strerror, SMALLER) from None


def _parsed(path: Path, found: Iterator[bytes]) -> Iterator[tuple[str, Any]]:
    try:
        first = _parse(next(found, b""))
    except ValueError:
        try:
            yield "response", _parse(read_bytes(path, ANSWERS))
        except ValueError as error:
            raise wrong(path, "JSON, one document or one a line", error, "it is truncated or altered") from None
        return
    yield "line 1", first
    for number, line in enumerate(found, 2):
        if line.strip():
            try:
                yield f"line {number}", _parse(line)
            except ValueError as error:
                raise wrong(f"{path}: line {number}", "JSON", error, "it is truncated or altered") from None


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


FORMAT = Format(
    "sglang",
    "responses of SGLang with meta_info.routed_experts: JSON, or one a line",
    lambda probe: probe.is_json and (b'"routed_experts"' in probe.head or b'"meta_info"' in probe.head),
    read,
    first_layer=True,
)
