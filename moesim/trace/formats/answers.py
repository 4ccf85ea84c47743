"""What the user said about a source, checked: a wrong answer is told apart from a damaged source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.errors import InputError, unknown_name
from moesim.model import builtin_models
from moesim.trace.check import LABELS, check_ids
from moesim.trace.formats.contract import Options, Part, wrong
from moesim.trace.formats.format import Format
from moesim.trace.formats.store import pieces

if TYPE_CHECKING:
    from numpy.typing import NDArray

_OR_MODEL = ", or the --model's name"


def check_label(label: str | None) -> None:
    """Check ``--label``."""
    if label is not None and label not in LABELS:
        raise InputError(f"--label {label}: expected {' or '.join(LABELS)}, got '{label}'; correct it")


def check_columns(form: Format, options: Options) -> None:
    """Check that a format has the columns that ``--column`` maps, and that they do not contradict each other."""
    for ours, theirs in options.columns.items():
        place = f"--column {ours}={theirs}"
        if not form.columns:
            raise InputError(
                f"{place}: expected no column, since those of {form.name} have fixed names, got '{ours}'; leave it out"
            )
        if ours not in form.columns:
            raise InputError(f"{place}: expected one of OURS in OURS=THEIRS, got {unknown_name('column', ours, form.columns)}")
    if {"phase", "step"} <= set(options.columns):
        raise InputError(f"--column step={options.columns['step']}: expected it or a phase, got both; leave one out")


def shape_remedy(options: Options, remedy: str) -> str:
    """Say why a model's name did not give the shape that is missing, if one was given; else `remedy`."""
    if options.model is None or options.spec is not None:
        return remedy
    no_model = unknown_name("built-in model", options.model, builtin_models())
    return f"{no_model}; correct --model, or {remedy.removesuffix(_OR_MODEL)}"


def check_experts(ids: NDArray[np.uint16], n_experts: int, file: Path, form: Format, part: Part, options: Options) -> None:
    """Check the expert ids of one file."""
    place = f"{file}: expert"
    if form.first_layer and ids.shape[2] > 1:
        _check_dense(ids, place, _left_out(part, options))
    remedy = "export it again" if part.n_experts is not None else "check --n-experts or --model"
    first = 0
    for piece in pieces(ids):
        bad = np.argwhere(piece >= n_experts)
        if len(bad):
            row, layer, rank = bad[0].tolist()
            raise wrong(f"{place}[{first + row}, {layer}, {rank}]", f"0..{n_experts - 1}", piece[row, layer, rank], remedy)
        first += len(piece)
    check_ids(ids, n_experts, place)


def _left_out(part: Part, options: Options) -> int:
    if options.first_layer is not None:
        return options.first_layer
    return int(part.facts.get("dense_layers_left_out", 0))


def _check_dense(ids: NDArray[Any], place: str, left_out: int) -> None:
    """Find leading layers of zeros, which is what engines write for layers without experts."""
    routed = np.zeros(ids.shape[1], bool)
    for piece in pieces(ids):
        routed |= piece.any(axis=(0, 2))
        if routed[0]:  # in the first piece of most sources
            return
    n_zero = int(np.argmax(np.append(routed, True)))
    if n_zero == ids.shape[1]:
        raise wrong(place, "distinct experts", "zeros only, in all layers", "no routing was recorded; record it again")
    where = f"layer {left_out}" if n_zero == 1 else f"layers {left_out}..{left_out + n_zero - 1}"
    remedy = f"if {'it is' if n_zero == 1 else 'they are'} dense, give --first-layer {left_out + n_zero}"
    raise wrong(place, "distinct experts in each layer", f"zeros only in {where}", remedy)
