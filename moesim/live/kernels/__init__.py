"""The computations and copies that are measured and replayed (needs the optional extra ``moesim[profile]``).

The hardware profiler times exactly these kernels, and the live replay runs exactly these, so that what is measured is
what is run. Only this package and ``moesim.recorder`` import torch.
"""

from __future__ import annotations

import importlib.util

from moesim.live.kernels.plans import KernelError


def require_torch() -> None:
    """Refuse in one line where PyTorch is not installed; the modules of this package import it."""
    if importlib.util.find_spec("torch") is None:
        raise KernelError(
            "profile measure and replay need PyTorch: expected the package torch, got none; pip install 'moesim[profile]'"
        )
