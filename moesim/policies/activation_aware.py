"""MoE-Infinity's replacement: by what past sequences like the present ones did, or, as released, by use over the whole run.

L. Xue, Y. Fu, Z. Lu, L. Mai, M. Marina, "MoE-Infinity: Efficient MoE Inference on Personal Machines with Sparsity-Aware Expert
Cache", arXiv:2401.14361; code: EfficientMoE/MoE-Infinity. The whole system is `moesim.policies.systems.moe_infinity`.

| point | paper says | released code does | we do (``reading``) |
|---|---|---|---|
| victim | lowest activation ratio, nearer layers weighing more | the lowest count of visits since the start | ``paper``: lowest (p + 1e-8)(1 - (j - l) / (L + 1)), layers passed at 0; ``code``: lowest count |
| its memory | matrices of past sequences | counts of all experts, kept when evicted | the same |
| match | rows seen so far | masks these rows and compares the later ones | ``paper``: rows 0 .. l, mean cosine |
| where past sequences come from | a data set, ahead | 1000, from the run | requests of this run that are over; before there is one, the present sequences' own counts |
| a full store | replaced by similarity | the same | the oldest is replaced |
| several sequences at once | - | each is matched; priorities add up | the mean over the sequences of the step |
| experts of the present layer as victims | protected | locked once they are queued | only if there is nothing else; ``victims: idle``: like any other; they leave once they have run |
| ties | - | expert by expert, within it layer by layer | the same for both readings |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from moesim.policies.algorithms.activations import Past
from moesim.policies.base import Range
from moesim.policies.parts import Part, Setup, Swap, Unit
from moesim.policies.visit import UNROUTED_FIRST, PresentVisit, Victims, first_resident
from moesim.policy import Fetch, Routed, StepBegin, View

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ActivationAware(Part):
    """The one least likely to be used by sequences like these (MoE-Infinity), or, as released, used least so far."""

    admits = True
    swaps = False

    reading: Literal["paper", "code"] = "paper"
    """By the closest past sequence, or by the count of visits since the start."""
    capacity: Annotated[int, Range(1)] = 1000
    """Past sequences kept; ``paper`` only. The released code keeps 1000."""
    victims: Victims = UNROUTED_FIRST
    """Routed experts of the present layer visit are named only if there are no others, or like any other; they leave after their run."""

    def start(self, setup: Setup, residents: Sequence[Sequence[int]] = ()) -> None:
        """Begin with nothing counted."""
        model = setup.view.model
        self._gpu = setup.gpu
        self._per_layer = setup.per_layer
        shape = (model.n_experts, model.n_layers)  # expert by expert: the first smallest is the one the ties go to
        self._members = np.zeros(shape, np.bool_)
        self._visits = np.zeros(shape)
        self._values: NDArray[Any] | None = None  # of the members, inf for others; None: to be worked out
        self._past = Past(self.capacity, model.n_layers, model.n_experts) if self.reading == "paper" else None
        self._now = model.n_layers - 1  # the layer routed last
        self._visit = PresentVisit()
        for layer, experts in enumerate(residents):
            self.inserted(layer, experts)

    def step_begin(self, event: StepBegin) -> None:
        """Note whose rows are whose."""
        if self._past is not None:
            self._past.begin(event.requests, event.phase == "decode")

    def used(self, event: Routed) -> None:
        """Count the visit."""
        self._now = event.layer
        self._visit.add(event)
        self._values = None
        self._visits[event.active, event.layer] += 1
        if self._past is not None:
            self._past.count(event.layer, event.experts, event.first_row)

    def inserted(self, layer: int, experts: Sequence[int]) -> None:
        """Take note of experts that are being fetched into the cache."""
        self._members[list(experts), layer] = True
        self._values = None

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        """Name the one with the lowest value."""
        if self._values is None:
            value = self._visits if self._past is None else self._past.priority(self._now).T
            self._values = np.where(self._members, value, np.inf)
        values = self._values[:, fetch.layer] if self._per_layer else self._values.ravel()
        found = first_resident(self._ranked(values, fetch.layer), self._visit.spared(self.victims), self._gpu, view)
        if found is not None:
            layer, expert = found
            self._members[expert, layer] = False
            self._values[expert, layer] = np.inf
        return found

    def _ranked(self, values: NDArray[Any], layer: int) -> Iterator[Unit]:
        """Go through the members by ascending value, of equals the first."""
        left = values.copy()
        while left[i := int(left.argmin())] != np.inf:
            yield (layer, i) if self._per_layer else divmod(i, self._members.shape[1])[::-1]
            left[i] = np.inf

    def layer_end(self, step: int, layer: int) -> Swap | None:
        """Replace nothing: replacement happens on demand."""
        return None
