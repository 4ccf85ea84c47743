"""Strata's ``--dump-routing``: records of int32 layer and k, then k int32 and k float32; a negative layer is a tag.

A record is a position's experts and weights in a layer. A window goes through the layers with all its positions; the tag -1
after it has its number, its positions, how many drafts were accepted, and whether it was decoded. Rejected drafts are left out.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np

from moesim.trace.formats.contract import MAX_ID, Format, Options, Part, Probe, Store, wrong
from moesim.trace.formats.visits import complete_tokens, counted

_COMMIT, _FORMAT, _REQUEST = -1, -2, -3


def matches(probe: Probe) -> bool:
    """Return whether a file begins with the tag of the format, or with two records of layers."""
    words, at = np.frombuffer(probe.head[: len(probe.head) // 4 * 4], "<i4"), 0
    for _ in range(0 if words[:2].tolist() == [_FORMAT, 1] else 2):
        layer, k = words[at : at + 2].tolist() if len(words) > at + 1 else (-1, 0)
        ids, weights = words[at + 2 : at + 2 + k], words[at + 2 + k : at + 2 + 2 * k].view("<f4")
        if not 0 <= layer < 1024 or not 0 < k <= 64 or len(weights) < k or ids.min() < 0 or ids.max() > MAX_ID:
            return False
        if not ((weights >= 0) & (weights <= 100)).all():
            return False
        at += 2 + 2 * k
    return len(words) > 1


def read(path: Path, options: Options, store: Store) -> Part:
    """Read a file."""
    if (n_bytes := path.stat().st_size) % 4 or not n_bytes:
        raise wrong(path, "records of numbers of 4 bytes", f"{n_bytes} bytes", "it is truncated")
    words = np.memmap(path, "<i4", "r")
    start, layers, windows = array("q"), array("q"), array("q")
    ends: list[tuple[int, int, int]] = []  # of each window: the last position that counts, 1 if it was decoded, its request
    at, request, tagged = 0, 0, bool(words[0] < 0)
    while at < len(words):
        layer, k = int(words[at]), int(words[at + 1]) if at + 1 < len(words) else 0
        if k < 1 or at + 2 + 2 * k > len(words):
            raise wrong(f"{path}: word {at}", "a record with its experts and weights", f"k = {k}", "it is truncated or altered")
        if layer >= 0:
            if not tagged and layers and layer < layers[-1]:
                ends.append((0, 0, 0))
            start.append(at)
            layers.append(layer)
            windows.append(len(ends))
        elif layer == _COMMIT and k == 4:
            accepted, decoded = words[at + 4 : at + 6].tolist()
            ends.append((accepted if decoded else MAX_ID, int(decoded == 1), request))  # all positions of a prompt count
        request += layer == _REQUEST
        at += 2 + 2 * k
    last, phase, of_request = np.array(ends if tagged else [*ends, (0, 0, 0)], np.int64).reshape(-1, 3).T
    begin, layer_of, window = (np.frombuffer(column, np.int64) for column in (start, layers, windows))
    whole = window < len(last)  # a recording may stop within a window
    begin, layer_of, window = begin[whole], layer_of[whole], window[whole]
    position = counted(window, layer_of)
    if not tagged and position.any():
        remedy = "record it without drafts, or with a Strata that writes tags"
        raise wrong(path, "tags that say which drafts were accepted", "windows of several positions without tags", remedy)
    if not len(begin) or (words[begin + 1] != words[begin[0] + 1]).any():
        raise wrong(path, "records with the same number of experts", "none, or others")
    kept = position <= last[window]
    begin, layer_of, window, position = begin[kept], layer_of[kept], window[kept], position[kept]
    sizes = np.zeros(len(last), np.int64)
    np.maximum.at(sizes, window, position + 1)
    first = np.cumsum(sizes) - sizes
    first -= first[np.searchsorted(of_request, of_request)]  # tokens count from 0 in each request
    cells = begin[:, None] + 2 + np.arange(k := int(words[begin[0] + 1]))
    weights = words.view("<f4")[cells + k]
    columns: dict[str, Any] = {"layer": layer_of, "token": first[window] + position} | (
        {"phase": phase[window]} if tagged else {}
    )
    return complete_tokens(
        str(path), store, options.incomplete, words[cells], weights=weights if weights.any() else None,
        request=of_request[window], **columns,
    )  # fmt: skip


FORMAT = Format("strata", "routing of Strata: the file of --dump-routing", matches, read)
