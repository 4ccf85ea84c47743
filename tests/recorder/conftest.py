"""Tests of the recorder need the extra record: without it they are not collected."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if all(map(find_spec, ("torch", "transformers", "tokenizers"))) else ["test_*.py"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with two models and two files of prompts."""
    from tests.recorder.record_kit import make_home

    return make_home(tmp_path_factory.mktemp("record"))
