"""Which of many experts with a value each leaves first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def lowest_idle(values: NDArray[np.float64], in_use: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...] | None:
    """Return the place of the lowest value that is not in use, of equals the first in C order; inf marks places not asked about.

    ``values`` must be contiguous; they are changed on the way and restored.

    >>> lowest_idle(np.array([[3.0, 1.0], [1.0, np.inf]]), lambda place: place == (0, 1))
    (1, 0)
    """
    flat, busy = values.ravel(), []
    found = None
    while found is None and (lowest := flat[at := int(flat.argmin())]) != np.inf:
        place = tuple(int(i) for i in np.unravel_index(at, values.shape))
        if in_use(place):
            busy.append((at, lowest))
            flat[at] = np.inf
        else:
            found = place
    for at, value in busy:
        flat[at] = value
    return found
