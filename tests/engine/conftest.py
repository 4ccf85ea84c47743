"""Every test of the engine's rules runs on both engines, where the native one is built."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from moesim.engine import native
from moesim.engine.entry import ENGINES, VARIABLE

NOT_BUILT = "the native engine is not built"


@pytest.fixture(
    scope="module",
    autouse=True,
    params=[pytest.param(name, marks=pytest.mark.skipif(name == "native" and not native.AVAILABLE, reason=NOT_BUILT))
            for name in ENGINES],
)  # fmt: skip
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which engine a test runs on."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = request.param
    yield request.param
    if before is None:
        del os.environ[VARIABLE]
    else:
        os.environ[VARIABLE] = before
