"""Options of the test suite, and what to leave out where PyTorch is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

# No example fails for being slow: the machine may be busy.
settings.register_profile("moesim", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("moesim")

# Doctests import the modules.
_NEED_TORCH = ["moesim/recorder/*", "moesim/kernels/*", "moesim/live/*", "moesim/profiler/*"]
collect_ignore_glob = [] if find_spec("torch") else _NEED_TORCH


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes the golden results anew."""
    parser.addoption("--regenerate", action="store_true", help="write tests/data/golden.json anew")
