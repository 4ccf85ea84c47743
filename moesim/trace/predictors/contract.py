"""What a source of predictions is, and what it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

if TYPE_CHECKING:
    from moesim.trace.workload import Step

Prediction = tuple[NDArray[Any], NDArray[Any] | None]


class Predictor(Protocol):
    """What a source of predictions is.

    One that has ``all_layers(step)`` and ``first_layer`` tells by them the ids of a whole step at once, as `predict` does layer
    by layer; the native engine then asks it once a step.
    """

    name: str
    label: str
    """What a result that used it must say; empty if nothing."""

    def needs_layer(self, layer: int) -> int | None:
        """Tell at which layer the gate input must exist before ``layer`` can be predicted; None: at none."""

    def predict(self, step: Step, mb: int, layer: int) -> Prediction | None:
        """Predict a layer for the rows of a micro-batch.

        Returns
        -------
        ids : (n_rows, top_k) integer
            Expert ids, best first.
        scores : (n_rows, top_k), (n_rows, n_experts) or None
            Beside the ids, or of all experts.

        None stands for no prediction.
        """
