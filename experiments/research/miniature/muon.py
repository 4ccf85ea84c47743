"""An optimiser for small budgets: momentum made orthogonal for matrices, AdamW for the rest.

A miniature sees a few million tokens, so what counts is progress per token. In short trials on this corpus
(80 steps of 2048 tokens, same model) this reached a held-out loss of 6.07 where AdamW alone, at 2e-3, reached
6.55; a step costs about a fifth more.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: Quintic iteration that drives all singular values towards 1 (K. Jordan 2024, "Muon").
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, n_iterations: int) -> Tensor:
    """Replace each matrix by about the nearest one with orthonormal rows (or columns).

    Parameters
    ----------
    matrices : Tensor, (n, rows, columns)
    n_iterations : int

    Returns
    -------
    Tensor, (n, rows, columns)
        In bfloat16, which is enough for a direction.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if is_tall else matrices).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(n_iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = x.mT if is_tall else x
    return result


class MatrixMomentum:
    """Muon for the matrices of attention and experts; AdamW for embeddings, routers and norms.

    Parameters
    ----------
    model : nn.Module
    matrix_rate : float
        Peak learning rate of the matrices (their updates have singular values near 1).
    other_rate : float
        Peak learning rate of AdamW.
    weight_decay : float
        Of the matrices, decoupled.
    momentum : float
    n_iterations : int
        Newton-Schulz iterations.
    """

    def __init__(
        self,
        model: nn.Module,
        matrix_rate: float,
        other_rate: float,
        weight_decay: float,
        momentum: float = 0.95,
        n_iterations: int = 4,
    ) -> None:
        self.matrix_rate = matrix_rate
        self.other_rate = other_rate
        self.weight_decay = weight_decay
        self.momentum = momentum
        self.n_iterations = n_iterations
        named = list(model.named_parameters())
        self._matrices = [p for name, p in named if p.ndim >= 2 and "embed" not in name and "gate.weight" not in name]
        held = {id(p) for p in self._matrices}
        self._adamw = torch.optim.AdamW(
            [p for _, p in named if id(p) not in held],
            lr=other_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        )
        self._averages = [torch.zeros_like(p) for p in self._matrices]

    def step(self, scale: float) -> None:
        """Apply the gradients, at `scale` times the peak rates, and clear them."""
        with torch.no_grad():
            for group in self._adamw.param_groups:
                group["lr"] = self.other_rate * scale
            self._adamw.step()
            self._adamw.zero_grad()
            rate = self.matrix_rate * scale
            for parameter, average in zip(self._matrices, self._averages, strict=True):
                if parameter.grad is None:
                    continue
                average.lerp_(parameter.grad, 1 - self.momentum)
                ahead = parameter.grad.lerp(average, self.momentum)
                n_rows, n_columns = parameter.shape[-2:]
                update = orthogonalise(ahead.reshape(-1, n_rows, n_columns), self.n_iterations)
                parameter.mul_(1 - rate * self.weight_decay)
                parameter.sub_(update.reshape(parameter.shape).float(), alpha=rate * max(1.0, n_rows / n_columns) ** 0.5)
                parameter.grad = None
