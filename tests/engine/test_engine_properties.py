"""What holds for any valid policy on any machine: random ones, checked from their records."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings

from tests.engine.wild_kit import ANYTHING, play_anything


@settings(max_examples=40, derandomize=True)
@given(**ANYTHING)
def test_any_policy(**anything: Any) -> None:
    play_anything(**anything)
