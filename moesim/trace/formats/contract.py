"""What the user says about a source of routing, and what a format found in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moesim.errors import TraceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moesim.model import ModelSpec

#: What ``--phase`` may say: of all rows, or that the prompt comes first and decode after it.
PHASES = ("decode", "prefill", "both")


@dataclass(frozen=True)
class Options:
    """What the user said about a source.

    Attributes
    ----------
    model : str or None
        Name of the model; one that is built in (or a ``config.json``) also gives `spec`.
    spec : ModelSpec or None
        Its shape, if it is known.
    n_experts, n_layers, top_k : int or None
        What the source does not say; from `spec` where the user did not.
    first_layer : int or None
        Layers before this one are dense and hold no routing.
    phase : {"decode", "prefill", "both"} or None
        Phase of the rows, where it is not recorded.
    n_prompt : tuple of int or None
        Prompt tokens of each request, or of all if there is one number.
    columns : mapping of str to str
        Our name of a column or array -> its name in the source.
    incomplete : {"tokens", "layers"}
        What is left out where a source lacks a layer of some tokens.
    """

    model: str | None = None
    spec: ModelSpec | None = None
    n_experts: int | None = None
    n_layers: int | None = None
    top_k: int | None = None
    first_layer: int | None = None
    phase: str | None = None
    n_prompt: tuple[int, ...] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    incomplete: str = "tokens"


@dataclass(frozen=True)
class Part:
    """What a format found in one file, beside the routing that it put into the store."""

    lengths: NDArray[np.int64]  # rows of each request, in the order in which they were stored
    n_prompt: NDArray[np.int64] | None = None  # prompt tokens of each, if the source says
    phased: bool = False  # whether the source says that the first `n_prompt` rows are the prompt and all others decode
    offset: NDArray[np.int64] | None = None  # position of the first row of each; None: 0
    n_experts: int | None = None  # if the source says
    # model, label: if the source says
    model: str | None = None
    label: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # more for the header
    notes: tuple[str, ...] = ()  # what was left out and why, one line each, for the user and the header


def wrong(place: object, expected: object, got: object, remedy: str = "export it again") -> TraceError:
    """Build the one line for something that is wrong in a source."""
    text = " ".join(f"{place}: expected {expected}, got {got}; {remedy}".split())
    return TraceError(text if len(text) <= 1000 else f"{text[:997]}...")
