"""Words of the pages, as ``wc -w`` counts them: above its limit a test fails.

Raising a limit is a change of its own, with the reason next to the number.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

WORDS = {  # what a folder or a page may have today
    "docs/guide": 13_870,  # 13,500
    "docs/reference": 11_421,  # a page for Python users; from where relative paths are looked for
    "docs/background": 9_387,
    "CHANGELOG.md": 650,
}


def words_of(place: str) -> int:
    path = ROOT / place
    pages = sorted(path.rglob("*.md")) if path.is_dir() else [path]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


@pytest.mark.parametrize("place", WORDS)
def test_pages_stay_within_their_words(place: str):
    assert 0 < words_of(place) <= WORDS[place]
