"""Gradients of one batch by two or more processes, each with one thread.

Threads of one process meet after every operation, thousands of times a step; on a machine that others use
too, each waits for the slowest there. Processes meet once a step.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

#: Computes the gradients of a batch (n_rows, n_tokens) and returns (loss, imbalance).
Backward = Callable[[Tensor], tuple[float, float]]


class Helpers:
    """Context manager over processes that share a model's weights and compute gradients of parts of a batch.

    Parameters
    ----------
    model : nn.Module
        Its parameters are moved to shared memory, so that every update is seen by all.
    n_helpers : int
        Processes next to this one; 0: none.
    make_backward : callable
        ``make_backward(parameters, *arguments)``, a function of a module, builds a helper's model on those
        parameters and returns it with its `Backward`.
    arguments : tuple
        For `make_backward`; sent to the processes.
    """

    def __init__(
        self,
        model: nn.Module,
        n_helpers: int,
        make_backward: Callable[..., tuple[nn.Module, Backward]],
        *arguments: Any,
    ) -> None:
        self._parameters = list(model.parameters())
        self._n_helpers = n_helpers
        self._make_backward = make_backward
        self._arguments = arguments
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._gradients: list[list[Tensor]] = []

    def __enter__(self) -> Helpers:
        context = multiprocessing.get_context("spawn")
        if self._n_helpers:
            for parameter in self._parameters:
                _share(parameter.data)
        data = [parameter.data for parameter in self._parameters]
        for _ in range(self._n_helpers):
            gradients = [_share(torch.zeros_like(tensor)) for tensor in data]
            here, there = context.Pipe()
            process = context.Process(
                target=_help, args=(there, data, gradients, self._make_backward, self._arguments), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
            self._gradients.append(gradients)
        return self

    def __exit__(self, *error: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()  # a helper ends when nobody is at the other end
            process.join()

    def gradients(self, batch: Tensor, backward: Backward) -> tuple[float, float]:
        """Put the mean gradients of a batch on the model's parameters.

        Parameters
        ----------
        batch : Tensor, (n_rows, n_tokens) int64
            Dealt out in turn to this process and the helpers; a multiple of their number.
        backward : callable
            For this process's part.

        Returns
        -------
        tuple of float
            Means of loss and imbalance.
        """
        n_parts = self._n_helpers + 1
        for number, pipe in enumerate(self._pipes, start=1):
            part = batch[number::n_parts].contiguous()
            pipe.send_bytes(struct.pack("<q", part.shape[1]) + part.numpy().tobytes())
        facts = [backward(batch[::n_parts])]
        for pipe, gradients in zip(self._pipes, self._gradients, strict=True):
            facts.append(struct.unpack("<2d", pipe.recv_bytes()))
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                assert parameter.grad is not None
                parameter.grad.add_(gradient)
        if n_parts > 1:
            for parameter in self._parameters:
                assert parameter.grad is not None
                parameter.grad.div_(n_parts)
        return sum(f[0] for f in facts) / n_parts, sum(f[1] for f in facts) / n_parts


def _share(tensor: Any) -> Tensor:
    shared: Tensor = tensor.share_memory_()
    return shared


def _help(
    pipe: Connection,
    data: Sequence[Tensor],
    gradients: Sequence[Tensor],
    make_backward: Callable[..., tuple[nn.Module, Backward]],
    arguments: tuple[Any, ...],
) -> None:
    """Life of a helper: a part of a batch comes in, its gradients and (loss, imbalance) go out."""
    torch.set_num_threads(1)
    model, backward = make_backward(data, *arguments)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        (n_tokens,) = struct.unpack_from("<q", message)
        part = np.frombuffer(message, np.int64, offset=8).reshape(-1, n_tokens).copy()
        facts = backward(torch.from_numpy(part))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            if parameter.grad is None:
                gradient.zero_()
            else:
                gradient.copy_(parameter.grad)
        model.zero_grad()
        pipe.send_bytes(struct.pack("<2d", *facts))
