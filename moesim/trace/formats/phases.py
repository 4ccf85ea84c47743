"""Which rows of a request are its prompt, from a phase or from the number of the forward pass of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.trace.formats.contract import wrong

if TYPE_CHECKING:
    from numpy.typing import NDArray

REMEDY = (
    "if it numbers forward passes, the first of a request being its prompt, map it with --column step=NAME; else leave it "
    "out and give --n-prompt"
)
"""What to do with phases that are none."""
_N_PROMPT = "give --n-prompt with the tokens of each prompt, and no step"


def phases_of_steps(place: str, step: NDArray[Any], request: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Tell prompts from decoded tokens where each forward pass has a number.

    >>> phases_of_steps("a.csv", np.array([4, 4, 5, 6]), np.zeros(4, np.int64)).tolist()
    [0, 0, 1, 1]
    """
    begins = np.append(True, request[1:] != request[:-1])
    first = step[begins][np.cumsum(begins) - 1]
    again = ~begins & np.append(False, step[1:] == step[:-1])
    back = np.flatnonzero(~begins & np.append(False, step[1:] < step[:-1]))
    if len(back):
        row = int(back[0])
        raise wrong(f"{place}: request {request[row]}", f"a step of at least {step[row - 1]}", step[row], "steps count up")
    late = np.flatnonzero(again & (step != first))
    if len(late):
        row = int(late[0])
        got = f"several in step {step[row]}"
        raise wrong(f"{place}: request {request[row]}", "one token in each step after the first", got, _N_PROMPT)
    if not again.any() and len(step) > int(begins.sum()):
        expected = "a first step with the tokens of the prompt"
        raise wrong(f"{place}: step", expected, "one token in every step, so that it numbers tokens", _N_PROMPT)
    phase: NDArray[np.uint8] = (step != first).astype(np.uint8)
    return phase
