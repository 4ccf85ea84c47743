"""Both engines on thousands of random policies, machines and workloads: the same records, to the nanosecond."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from moesim.engine.native import AVAILABLE
from tests.engine import parts_kit
from tests.engine.free_kit import assert_alike
from tests.engine.wild_kit import ANYTHING, play_anything


@pytest.mark.skipif(not AVAILABLE, reason="the native engine is not built")
def test_both_engines(request: pytest.FixtureRequest) -> None:
    n = request.config.getoption("--engines")

    @settings(max_examples=n, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(**ANYTHING)
    def campaign(**anything: Any) -> None:
        play_anything(**anything)

    campaign()


@pytest.mark.skipif(not AVAILABLE, reason="the native engine is not built")
def test_both_engines_on_any_actions(request: pytest.FixtureRequest) -> None:
    for seed in range(request.config.getoption("--engines")):
        assert_alike(seed)


@pytest.mark.skipif(not AVAILABLE, reason="the native engine is not built")
def test_native_parts_decide_as_those_in_python(request: pytest.FixtureRequest) -> None:
    for seed in range(request.config.getoption("--engines")):
        parts_kit.assert_alike(seed)
