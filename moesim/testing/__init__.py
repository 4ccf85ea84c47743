"""Tools for tests of policies: tiny models and machines, routing, and the common checks."""

from moesim.testing.conformance import Check, CheckError, Report, check_policy, examine_policy
from moesim.testing.fakes import GPU_NS, TRANSFER_NS, FakeView, routed, tiny_machine, tiny_model
from moesim.testing.runs import run_tiny, tiny_workload

__all__ = [
    "GPU_NS", "TRANSFER_NS", "Check", "CheckError", "FakeView", "Report", "check_policy", "examine_policy",
    "routed", "run_tiny", "tiny_machine", "tiny_model", "tiny_workload",
]  # fmt: skip
