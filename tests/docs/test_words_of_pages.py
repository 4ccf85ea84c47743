"""Words of the pages, as ``wc -w`` counts them: above its limit a test fails.

Raising a limit is a change of its own, with the reason next to the number.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

WORDS = {  # what a folder or a page may have today
    "docs/guide": 12_990,  # a picture a guide, in words for those who do not see it
    "docs/reference": 10_768,
    "docs/background": 8_874,
    "docs/contributing.md": 574,
    "CHANGELOG.md": 588,
}


def words_of(place: str) -> int:
    path = ROOT / place
    pages = sorted(path.rglob("*.md")) if path.is_dir() else [path]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


@pytest.mark.parametrize("place", WORDS)
def test_pages_stay_within_their_words(place: str):
    assert 0 < words_of(place) <= WORDS[place]
