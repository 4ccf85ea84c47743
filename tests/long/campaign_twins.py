"""Native twins of the algorithms on a hundred thousand random instances each: the same answers and errors as their references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.policies.twins_kit import BUILT, MAKERS, compare


@pytest.mark.skipif(not BUILT, reason="the native engine is not built")
@pytest.mark.parametrize("reference", MAKERS, ids=lambda reference: reference.__name__)
def test_twins(reference: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    compare(reference, request.config.getoption("--twins"), request.config.getoption("--campaign-seed") + 1)
