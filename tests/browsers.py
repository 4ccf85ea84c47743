"""A headless browser: the one that MOESIM_BROWSER names, else one on the path, else Playwright's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import HANG_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")


def executable(playwright: Any) -> str:
    given = os.environ.get("MOESIM_BROWSER")
    found = given or next((path for name in NAMES if (path := shutil.which(name))), None) or playwright.chromium.executable_path
    if not Path(found).exists():
        pytest.skip("no browser: set MOESIM_BROWSER to one, put chromium on the path, or run `playwright install chromium`")
    return str(found)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable(playwright), timeout=1000 * HANG_S)
        yield started
        started.close()
