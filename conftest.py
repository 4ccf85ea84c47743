"""Options of the test suite, and what to leave out where PyTorch is not installed."""

from __future__ import annotations

import gc
import os
import signal
from importlib.util import find_spec
from typing import Any

import pytest
from cachetools import LRUCache
from hypothesis import HealthCheck, settings

# Before NumPy and PyTorch are imported: threads that wait for each other on a busy machine take many times as long as one thread.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# A suite that runs in the background of a shell ignores Ctrl-C, and so would the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No example fails for being slow: the machine may be busy.
settings.register_profile("moesim", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("moesim")

# The shipped traces are read by hundreds of tests, and unpacking one takes up to a second. Unpacked arrays are read-only.
from moesim.trace import format as container  # noqa: E402 - after the number of threads

_unpack, _unpacked = container._restore, LRUCache[tuple[bytes, str], Any](48)  # the shipped traces have 39 large arrays, of 57 MB


def _remember(place: str, array: Any, fact: object) -> Any:
    key = array.tobytes(), repr(fact)
    if array.nbytes < 50_000:
        return _unpack(place, array, fact)
    if key not in _unpacked:
        _unpacked[key] = _unpack(place, array, fact)
    return _unpacked[key]


container._restore = _remember

# Doctests import the modules.
_NEED_TORCH = ["moesim/recorder/*", "moesim/live/kernels/*", "moesim/live/*", "moesim/live/profiler/*"]
collect_ignore_glob = [] if find_spec("torch") else _NEED_TORCH


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes the golden results anew."""
    parser.addoption("--regenerate", action="store_true", help="write golden results or a page's table anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what waits for a browser: as the last, in one process, it would leave the others without work."""
    items.sort(key=lambda item: not item.path.name.endswith("_browser.py"))


def pytest_collection_finish() -> None:
    """Take what is there by now out of the garbage collector's sight: it looked through all tests and PyTorch again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def regenerate(request: pytest.FixtureRequest) -> bool:
    """Whether a test is to write what it compares with."""
    asked = bool(request.config.getoption("--regenerate"))
    if asked and hasattr(request.config, "workerinput"):
        pytest.fail("--regenerate: expected one process, got several that would write the same file; leave out -n")
    return asked
