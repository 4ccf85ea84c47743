"""The computations and copies that are measured and replayed (needs ``moesim[profile]``).

The profiler times exactly the kernels that a replay runs.
"""

from __future__ import annotations

import importlib.util

from moesim.live.kernels.plans import KernelError


def require_torch() -> None:
    """Refuse in one line where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise KernelError(
            "profile measure and replay need PyTorch: expected the package torch, got none; pip install 'moesim[profile]'"
        )
