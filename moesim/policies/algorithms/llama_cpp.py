"""llama.cpp's choice of layers for the GPU, by its two options."""

from __future__ import annotations


def first_layers_on_gpu(n_layers: int, n_gpu_layers: int | None, n_cpu_moe: int = 0) -> tuple[int, int]:
    """Find the first layer that is on the GPU, and the first of which the experts are there, too.

    Parameters
    ----------
    n_layers : int
        Layers of the model, dense ones included.
    n_gpu_layers : int or None
        Layers for the GPU, from the end, of which the output layer is the first; None: all.
    n_cpu_moe : int
        First layers whose experts stay on the CPU, wherever the rest of the layer is.

    Returns
    -------
    tuple of int
        Layer numbers; ``n_layers`` where there is no such layer.

    Examples
    --------
    >>> [first_layers_on_gpu(4, n) for n in (0, 1, 2, 5, 9)]
    [(4, 4), (4, 4), (3, 3), (0, 0), (0, 0)]
    >>> first_layers_on_gpu(4, None, 3), first_layers_on_gpu(4, 3, 1), first_layers_on_gpu(4, 3, 9)
    ((0, 3), (2, 2), (2, 4))
    """
    first = 0 if n_gpu_layers is None else min(max(n_layers + 1 - n_gpu_layers, 0), n_layers)
    return first, max(first, min(n_cpu_moe, n_layers))
