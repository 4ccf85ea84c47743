"""Options of the campaigns: how many cases, and from which seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add counts and the seed."""
    group = parser.getgroup("campaigns")
    for name, n, what in (
        ("inputs", 3200, "mutated inputs"),
        ("flips", 3000, "flipped bits"),
        ("kills", 60, "kills"),
        ("audits", 60, "audited runs"),
        ("liveness", 3000, "runs that must end"),
        ("machines", 50, "identified machines"),
        ("engines", 2000, "random runs on both engines"),
        ("twins", 100_000, "random instances of each function with a native twin"),
        ("mutants", 200, "faults planted in the package"),
    ):
        group.addoption(f"--{name}", type=int, default=n, metavar="N", help=f"{what} of a campaign (default: {n})")
    group.addoption("--campaign-seed", type=int, default=0, metavar="N", help="another seed gives other cases (default: 0)")
    group.addoption("--liveness-case", type=int, metavar="N", help="only this run of the campaign of runs that must end")
    group.addoption("--campaign-log", type=Path, metavar="FILE", help="where findings and progress are written as they come")
    numbers = "faults of these numbers only, separated by commas"
    group.addoption("--only-mutants", type=lambda text: [*map(int, text.split(","))], default=[], metavar="NUMBERS", help=numbers)
    kinds = "cases of some kinds only, separated by commas"
    group.addoption("--only-kinds", type=lambda text: text.split(","), default=[], metavar="NAMES", help=kinds)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw figures, but do not render them: their data is what is compared."""
    import matplotlib.pyplot as plt

    png = b"\x89PNG\r\n\x1a\n" + bytes(32)

    def rendered(figure: Any, suffixes: Any = ("png", "pdf")) -> dict[str, bytes]:
        plt.close(figure)
        return dict.fromkeys(suffixes, png)

    monkeypatch.setattr("moesim.plots.style.rendered", rendered)
