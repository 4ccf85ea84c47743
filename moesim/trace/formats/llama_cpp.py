"""MoE traces of llama.cpp: CSV in two dialects, with or without a line of names, and lines of two forks.

``pos,layer,id0,..,idk``: a line for each token and layer. Positions below 0 are prefill, evenly up (-3, -2, -1) or down, or all
-1 with a layer's lines in token order; decode counts from 0 or on from the prompt, and prefill after it is the next request.
``layer,expert``: a line for each expert of one request, in passes over the layers. The same in a line for the tokens of a pass:
``route PASS LAYER K TOKENS ID:SLOT ...``; or for a token: the name of the tensor of gates, then ids.

The last layer has only tokens whose output is wanted: others are left out, or, where positions do not show which, the layer is.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.core.gate import ANSWERS, lines
from moesim.trace.formats.contract import Format, Lacks, Options, Part, Probe, Store, wrong
from moesim.trace.formats.tables import read_csv
from moesim.trace.formats.visits import complete_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray


def matches(probe: Probe) -> bool:
    """Return whether the first line names one of the dialects, or holds numbers only."""
    names = probe.csv_names
    if any(form.match(probe.head) for form in _LINES):
        return True
    return names == ["layer", "expert"] or _is_positional(names) or (probe.headless and len(names) >= 2)


# A line of moe-prefetch (LLAMA_MOE_ROUTE_TRACE) and one of GGML_MOE_LOG: layer, experts of a token and tokens, ids.
_LINES = (
    re.compile(rb"route \d+ (?P<layer>\d{1,9}) (?P<k>\d{1,9}) (?P<n>\d{1,9})(?P<ids>(?: \d{1,9}:-?\d+)+)\r?\n"),
    re.compile(rb"blk\.(?P<layer>\d{1,9})\.ffn_gate_exps\S*(?P<ids>(?: \d{1,9})+)\r?\n"),
)


def _is_positional(names: list[str]) -> bool:
    return len(names) >= 3 and names[:2] == ["pos", "layer"] and names[2:] == [f"id{i}" for i in range(len(names) - 2)]


def read(path: Path, options: Options, store: Store) -> Part:
    """Read a file."""
    probe = Probe(path)
    form = next((form for form in _LINES if form.match(probe.head)), None)
    if form is not None:
        return _read_lines(path, form, options, store)
    names = probe.csv_names
    given = None
    if probe.headless:
        names = given = ["layer", "expert"] if len(names) == 2 else ["pos", "layer", *(f"id{i}" for i in range(len(names) - 2))]
    if names == ["layer", "expert"]:
        return _read_passes(path, given, options, store)
    if not _is_positional(names):
        raise wrong(path, "columns layer,expert or pos,layer,id0,id1,...", ",".join(names)[:200], "name another --format")
    return _read_positions(path, names, given, options, store)


# ------------------------------------------------------------------------------------------- pos,layer,id0..idk


def _read_positions(path: Path, names: list[str], given: list[str] | None, options: Options, store: Store) -> Part:
    table = read_csv(path, {name: name for name in names}, names=given)
    pos, layer = table["pos"], table["layer"]
    if not len(pos):
        raise wrong(path, "routing of at least one token", "none", "record it again")
    request, token = _tokens(path, pos, layer)
    ids = np.stack([table[name] for name in names[2:]], axis=1)
    return complete_tokens(
        str(path), store, options.incomplete, ids, request=request, layer=layer, token=token, phase=pos >= 0
    )  # fmt: skip


def _tokens(path: Path, pos: NDArray[np.int64], layer: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    prefill = pos < 0
    starts = np.flatnonzero(prefill & ~np.concatenate([[False], prefill[:-1]]))
    # Without any prefill recorded, a request begins where the first position comes again in the first layer.
    starts = starts if len(starts) else np.flatnonzero((pos == pos[0]) & (layer == layer[0]))
    if starts[0] != 0:
        starts = np.concatenate([[0], starts])
    bounds = np.append(starts, len(pos))
    request = np.repeat(np.arange(len(starts)), np.diff(bounds))
    token = np.empty(len(pos), np.int64)
    for begin, end in pairwise(bounds.tolist()):
        place = f"{path}: row {begin}"
        early = int(np.count_nonzero(prefill[begin:end]))
        middle = begin + early
        n_prompt = 0
        if early:
            token[begin:middle], n_prompt = _prefill(place, pos[begin:middle], layer[begin:middle])
        later = pos[middle:end]
        shift = 0
        if early and end > middle:
            if later[0] not in (0, n_prompt):
                raise wrong(place, f"decode from position 0 or {n_prompt}", later[0], "positions must have no gaps")
            shift = n_prompt - int(later[0])
        token[middle:end] = later + shift
    return request, token


def _prefill(place: str, pos: NDArray[np.int64], layer: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    ids, counts = np.unique(layer, return_counts=True)
    first = pos[layer == ids[np.argmax(counts)]]  # tokens may lack layers at the start
    steps = set(np.diff(first).tolist())
    if not steps <= {1} and not steps <= {-1} and not (steps <= {0} and pos[0] == -1):
        expected = "positions of the prompt that count evenly up or down, or are all -1"
        raise wrong(place, expected, first[:6].tolist(), "positions must have no gaps")
    token = np.empty(len(layer), np.int64)
    for number in ids:
        here = np.flatnonzero(layer == number)
        token[here] = np.arange(len(here)) + (counts.max() - len(here))
    return token, int(counts.max())


# ------------------------------------------------------------------------------------------------ layer,expert


def _read_passes(path: Path, given: list[str] | None, options: Options, store: Store) -> Part:
    if options.top_k is None:
        raise Lacks(path, ["top_k"], "one expert a line")
    table = read_csv(path, {"layer": "layer", "expert": "expert"}, names=given)
    if not len(table["layer"]):
        raise wrong(path, "routing of at least one token", "none", "record it again")
    return _split(path, table["layer"], table["expert"], options.top_k, options, store)


def _read_lines(path: Path, form: re.Pattern[bytes], options: Options, store: Store) -> Part:
    layers, ids, width = array("q"), array("q"), 0
    with path.open("rb") as file:
        for number, line in enumerate(lines(file, ANSWERS), 1):
            facts = found.groupdict() if (found := form.fullmatch(line)) else {}
            here = [int(one.partition(b":")[0]) for one in facts.get("ids", b"").split()]
            k = int(facts.get("k", len(here)))
            if not here or len(here) != k * int(facts.get("n", 1)) or k != (width or k):
                expected = f"a line like the first, with {width or k} experts of each token"
                raise wrong(f"{path}: line {number}", expected, repr(line[:80]), "it is truncated or altered")
            layers.extend([int(facts["layer"])] * len(here))
            ids.extend(here)
            width = k
    return _split(path, np.frombuffer(layers, np.int64), np.frombuffer(ids, np.int64), width, options, store)


def _split(path: Path, layer: NDArray[np.int64], expert: NDArray[Any], k: int, options: Options, store: Store) -> Part:
    """Cut the lines into runs of one layer, and the runs into passes over the layers."""
    bad = np.flatnonzero((layer < 0) | (layer >= 2**15))
    if len(bad):
        raise wrong(f"{path}: layer of row {bad[0]}", "0..32767", layer[bad[0]])
    starts = np.concatenate([[0], np.flatnonzero(layer[1:] != layer[:-1]) + 1])
    lengths = np.diff(np.append(starts, len(layer)))
    bad = np.flatnonzero(lengths % k)
    if len(bad):
        row = int(starts[bad[0]])
        got = f"{lengths[bad[0]]} lines of layer {layer[row]} from row {row}"
        raise wrong(path, f"a multiple of {k} lines, the experts of whole tokens", got, "check --top-k; or it is truncated")
    run_layer, n_tokens = layer[starts], lengths // k
    number = np.cumsum(np.concatenate([[False], run_layer[1:] <= run_layer[:-1]]))
    passes = np.zeros(number[-1] + 1, np.int64)
    np.maximum.at(passes, number, n_tokens)
    first_token = np.cumsum(passes) - passes
    partial = n_tokens < passes[number]  # which of the tokens of the pass these are is not recorded
    run = np.repeat(np.arange(len(n_tokens)), n_tokens)  # of each token in a layer
    token = first_token[number[run]] + np.arange(len(run)) - (np.cumsum(n_tokens) - n_tokens)[run]
    known = ~partial[run]
    ids = expert.reshape(-1, k)[known]
    part = complete_tokens(str(path), store, options.incomplete, ids, layer=run_layer[run[known]], token=token[known])
    out = int(n_tokens[partial].sum())
    note = f"{out} entries left out: of a layer computed for some tokens of a pass, it is not recorded for which"
    return replace(part, notes=(note, *part.notes)) if out else part


FORMAT = Format("llama-cpp", "MoE traces of llama.cpp and forks: layer,expert; pos,layer,id0,..,idk; route lines", matches, read)
