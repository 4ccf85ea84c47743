"""Simulate offloaded inference of Mixture-of-Experts models, without the hardware.

>>> import moesim
>>> mine = moesim.Hardware.from_numbers(pcie="25GB/s", cpu="2ms/token", gpu="100us", vram="24GiB", ram="64GiB")
>>> found = moesim.compare(["lru", "dali"], hardware=mine, cache=[0.25, 0.5])  # doctest: +SKIP
>>> found.table, found.plot("speedup"), found.save("results/first")  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_FROM = {
    "Hardware": "moesim.hardware:HardwareProfile",  # made by load_hardware, from_parts or from_numbers
    "Result": "moesim.api.result:Result",
    "Trace": "moesim.trace:Trace",
    "calibrate": "moesim.api.answers:calibrate",
    "plot": "moesim.api.figures:plot",
    **{name: f"moesim.api.machine:{name}" for name in ("replay", "validate")},
    **{name: f"moesim.api.run:{name}" for name in ("compare", "load", "load_trace", "run")},
    **{name: f"moesim.api.studies:{name}" for name in ("capacity", "diff", "league", "papers", "regret", "report", "whatif")},
    "load_hardware": "moesim.hardware:load_hardware",
    "load_model": "moesim.model:load_model",
    "profile": "moesim.profile:",
    "recommend": "moesim.api.answers:recommend",
    "stats": "moesim.api.traces:stats",
    "trace": "moesim.trace:",  # with `import_`
}
"""Names and where they are: a name loads what it needs when it is first used, so that `import moesim` stays light."""

__all__ = sorted([*_FROM, "__version__"])  # their types are in `__init__.pyi`


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'moesim' has no attribute {name!r}")
    module, _, attribute = _FROM[name].partition(":")
    found = import_module(module)
    return globals().setdefault(name, getattr(found, attribute) if attribute else found)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM})
