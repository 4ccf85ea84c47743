"""Steps of a measurement that fail; their processes need no PyTorch, whose import takes most of the time of such a test."""

from __future__ import annotations

import os
import time
from typing import Any


def raises(setting: Any, until: float) -> list[str]:
    raise ValueError("on purpose")


def hangs(setting: Any, until: float) -> list[str]:
    time.sleep(600)
    return []


def dies(setting: Any, until: float) -> list[str]:
    os._exit(3)
