"""One expert for the rows that were routed to it: gather, compute, add to the outputs by gate weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from moesim.kernels.expert import ExpertKernel, Weights


def serve(kernel: ExpertKernel, weights: Weights, x: Tensor, rows: Tensor, gates: Tensor, sums: Tensor) -> None:
    """Serve some rows by one expert: what a Run of one expert is on a device.

    Parameters
    ----------
    kernel : ExpertKernel
        Of the expert's shape, on the device of all tensors.
    weights : tuple of Tensor
        As bound by the kernel.
    x : Tensor, act_dtype, shape (n, hidden)
        Inputs of all rows of the step.
    rows : Tensor, int64, shape (r,)
        Which of them.
    gates : Tensor, act_dtype, shape (r,)
        Weight of the expert for each.
    sums : Tensor, act_dtype, shape (n, hidden)
        Outputs are added here.
    """
    outputs = kernel.run(weights, x.index_select(0, rows))
    sums.index_add_(0, rows, outputs.mul_(gates.unsqueeze(1)))
