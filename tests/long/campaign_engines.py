"""Both engines on thousands of random policies, machines and workloads: the same records, to the nanosecond."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from moesim.engine.native import AVAILABLE
from tests.engine import test_engine_properties as properties


@pytest.mark.skipif(not AVAILABLE, reason="the native engine is not built")
def test_both_engines(request: pytest.FixtureRequest) -> None:
    n = request.config.getoption("--engines")
    one = settings(max_examples=n, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    one(given(**properties.ANYTHING)(properties.test_any_policy.hypothesis.inner_test))()
