"""What the makers of a report share: the sample, the reasons for what is missing, and how far they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moesim.core.progress import Progress
    from moesim.trace.stats.sample import Sample


@dataclass
class Context:
    """Handed to the maker of each group of figures."""

    sample: Sample  # the rows to describe
    frequency: NDArray[np.float64]  # their activation frequency
    progress: Progress  # where the steps are counted
    absent: dict[str, str] = field(default_factory=dict)  # figure of this group -> why it is None

    def begin(self, text: str, steps: int) -> None:
        """Say what is being done next; the steps count at once, as the bar is drawn when they are counted."""
        self.progress.describe(text)
        self.progress.advance(steps)
