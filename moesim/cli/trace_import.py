"""``moesim trace import`` and ``calibrate``: make a trace, and add what policies need."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Overwrite, name_or_mapping
from moesim.cli.outputs import said
from moesim.core.limits import COUNT, EXPERTS, LAYERS
from moesim.errors import InputError
from moesim.trace.calibrating import Additions
from moesim.trace.formats.contract import AXES
from moesim.trace.formats.importing import LABELS

HoldBack = StrEnum("HoldBack", ["requests", "ends"])
Uniform = StrEnum("Uniform", ["uniform"])

Seed = Annotated[int | None, typer.Option(min=0, max=COUNT.most, help="Seed of the choice of requests; default: 0.")]
HeldBack = Annotated[
    HoldBack | None,
    typer.Option("--hold-back", help="Whole requests (default), or ends of each."),
]
Weights = Annotated[Uniform | None, typer.Option(help="Missing weights: the same for each chosen expert.")]
Scores = Annotated[Uniform | None, typer.Option(help="Missing scores: the same for each chosen expert.")]


def additions(
    share: float | None,
    option: str,
    seed: int | None,
    hold_back: HoldBack | None,
    weights: Uniform | None,
    scores: Uniform | None,
) -> Additions:
    """Put the options together; `option` is the one that gives the share."""
    if share is None:
        _refuse([("--seed", seed), ("--hold-back", hold_back)], f"{option} next to it, got none; say how much is held back")
    if hold_back is HoldBack.ends:
        _refuse([("--seed", seed)], "no seed next to --hold-back ends, got one; leave it out, nothing is drawn")
    held_back = (hold_back or HoldBack.requests).value
    return Additions(share, seed or 0, held_back, weights is not None, scores is not None)


def _refuse(given: Sequence[tuple[str, object]], expected: str) -> None:
    for name, value in given:
        if value is not None:
            raise InputError(f"{name} {value}: expected {expected}")


Phase = StrEnum("Phase", ["decode", "prefill", "both"])
Incomplete = StrEnum("Incomplete", ["tokens", "layers"])


def trace_import(
    sources: Annotated[
        list[Path], typer.Argument(metavar="SRC...", help="Files of one format, or folders of npy and npz files.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The trace to write, NAME.safetensors.")],
    form: Annotated[str | None, typer.Option("--format", help="Of the sources; by content if not given.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Name, config.json, GGUF or {base: NAME, top_k: 1}."),
    ] = None,
    label: Annotated[str | None, typer.Option(help=f"{' or '.join(LABELS)}, if the source does not say.")] = None,
    n_experts: Annotated[int | None, typer.Option(min=1, max=EXPERTS.most, help="Routed experts of a layer.")] = None,
    n_layers: Annotated[
        int | None, typer.Option(min=1, max=LAYERS.most, help="Layers of the array, dense ones included.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, max=EXPERTS.most, help="Experts of a token in a layer.")] = None,
    first_layer: Annotated[
        int | None, typer.Option(min=0, max=LAYERS.most, help="Leave out layers before this one, as dense.")
    ] = None,
    phase: Annotated[Phase | None, typer.Option(help="Phase of all tokens, or both: prompt, then decode.")] = None,
    n_prompt: Annotated[str | None, typer.Option(metavar="N[,N...]", help="Prompt tokens of all requests, or of each.")] = None,
    axes: Annotated[str | None, typer.Option(metavar="A,B,C", help=f"What axes count, such as {','.join(AXES)}.")] = None,
    column: Annotated[
        list[str] | None, typer.Option(metavar="OURS=THEIRS", help="Name of a column in the source; repeat it.")
    ] = None,
    incomplete: Annotated[Incomplete, typer.Option(help="Left out where first tokens lack a layer.")] = Incomplete.tokens,
    calibrate: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Share of requests, held back, to count tables from."),
    ] = None,
    hold_back: HeldBack = None,
    seed: Seed = None,
    weights: Weights = None,
    scores: Scores = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
) -> None:
    """Make a trace from routing that was logged elsewhere.

    What a source does not record stays absent, unless it is asked for: tables counted from held-back requests (--calibrate),
    uniform weights. docs/guide/importing.md describes the formats.

    Example: moesim trace import routes/ --model qwen3-30b-a3b --calibrate 0.25 --out theirs.safetensors
    """
    wanted = additions(calibrate, "--calibrate", seed, hold_back, weights, scores)
    from moesim.api.traces import import_  # what knows every policy takes a while to import

    found = import_(
        sources, out, format=form, model=None if model is None else name_or_mapping(model, "--model"), label=label,
        n_experts=n_experts, n_layers=n_layers, top_k=top_k, first_layer=first_layer,
        phase=None if phase is None else phase.value, n_prompt=None if n_prompt is None else _numbers(n_prompt),
        axes=None if axes is None else _axes(axes), columns=_columns(column or []), incomplete=incomplete.value,
        calibrate=wanted.share, hold_back=wanted.held_back, seed=wanted.seed, weights=wanted.weights, scores=wanted.scores,
        overwrite=overwrite,
    )  # fmt: skip
    said(found)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (-1,)
    if not all(0 <= number < 2**31 for number in numbers):
        raise InputError(f"--n-prompt {text}: expected numbers of tokens separated by commas, got '{text}'; correct it")
    return numbers


def _axes(text: str) -> tuple[str, ...]:
    axes = tuple(part.strip() for part in text.split(","))
    if sorted(axes) != sorted(AXES):
        raise InputError(f"--axes {text}: expected {', '.join(AXES)}, each once, got '{text}'; the outermost comes first")
    return axes


def _columns(given: list[str]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for text in given:
        ours, equals, theirs = text.partition("=")
        if not equals or not ours or not theirs or ours in columns:
            raise InputError(
                f"--column {text}: expected OURS=THEIRS, each of ours once, got '{text}'; for example expert=topk_ids"
            )
        columns[ours] = theirs
    return columns


def trace_calibrate(
    trace: Annotated[str, typer.Argument(metavar="IN", help="Name or path of a trace.")],
    out: Annotated[Path, typer.Option("--out", help="The trace to write, NAME.safetensors.")],
    share: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Part of the requests to count tables from, such as 0.25; they are left out."),
    ] = None,
    counts: Annotated[
        Path | None,
        typer.Option(help="Counts of each layer and expert, of another recording of the model: a table of popularity."),
    ] = None,
    hold_back: HeldBack = None,
    seed: Seed = None,
    weights: Weights = None,
    scores: Scores = None,
    overwrite: Overwrite = False,
) -> None:
    """Add calibration tables or uniform weights to a trace.

    Tables are counted from requests, which are then not simulated, or taken from counts.

    The tables are activation_frequency, activation_frequency_decode, coactivation and activation_matrices; residual, where gate
    inputs were kept; expert_maps, where there are scores or weights. A trace that has tables gets the matrices and maps it lacks.
    With maps, a trace with embeddings gets the signal embedding: the map of the closest iteration that is left out.

    Example: moesim trace calibrate theirs.safetensors --share 0.25 --out calibrated.safetensors
    """
    wanted = additions(share, "--share", seed, hold_back, weights, scores)
    from moesim.api.traces import calibrate  # what knows every policy takes a while to import

    said(
        calibrate(
            trace, out, share=share, counts=counts, hold_back=wanted.held_back, seed=wanted.seed, weights=wanted.weights,
            scores=wanted.scores, overwrite=overwrite,
        )
    )  # fmt: skip
