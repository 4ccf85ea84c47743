"""For tests of policies, here and elsewhere: tiny models and machines, made-up routing, and the common checks."""

from moesim.testing.checks import (
    GPU_NS,
    TRANSFER_NS,
    FakeView,
    check_policy,
    routed,
    run_tiny,
    tiny_machine,
    tiny_model,
    tiny_workload,
)

__all__ = [
    "GPU_NS",
    "TRANSFER_NS",
    "FakeView",
    "check_policy",
    "routed",
    "run_tiny",
    "tiny_machine",
    "tiny_model",
    "tiny_workload",
]
