"""One expert for the rows that were routed to it: gather, compute, add to the outputs by gate weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from moesim.live.kernels.expert import ExpertKernel, Weights


def serve(kernel: ExpertKernel, weights: Weights, x: Tensor, rows: Tensor, gates: Tensor, sums: Tensor) -> None:
    """Serve some rows by one expert: what a Run of one expert is on a device."""
    outputs = kernel.run(weights, x.index_select(0, rows))
    sums.index_add_(0, rows, outputs.mul_(gates.unsqueeze(1)))
