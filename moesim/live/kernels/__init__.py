"""The computations and copies that are measured and replayed (needs the extra ``profile``).

The profiler times exactly the kernels that a replay runs.
"""

from __future__ import annotations

import importlib.util

from moesim.errors import install
from moesim.live.kernels.plans import KernelError


def require_torch() -> None:
    """Refuse in one line where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise KernelError(f"profile measure and replay need PyTorch: expected the package torch, got none; {install('profile')}")
