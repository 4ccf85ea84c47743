"""The page of schedulers has all of them with their options, and its example runs."""

from __future__ import annotations

import re
import sys

import pytest

from moesim.serving import SCHEDULERS
from moesim.serving.scheduler import options_of
from tests.docs.test_reference_pages import page, rows
from tests.serving.stepping_kit import Asked, run, table

TEXT = page("schedulers")
TABLES = rows(TEXT)


def test_every_scheduler_is_in_both_tables():
    named = [row[0].strip("`") for row in TABLES if row[0].startswith("`")]
    assert sorted(named) == sorted([*SCHEDULERS, *SCHEDULERS])


def test_options_have_their_defaults():
    for row in TABLES:
        if len(row) == 2 and row[0].startswith("`"):
            given = {
                key: str(one.default) for key, one in options_of(SCHEDULERS[row[0].strip("`")]).items() if key != "kv_tokens"
            }
            assert re.findall(r"`(\w+)` ([\w.]+)", row[1]) == [(key, value.lower()) for key, value in given.items()]


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "static"])
def test_a_scheduler_says_what_was_read_and_what_is_missing(name: str):
    text = sys.modules[SCHEDULERS[name].__module__].__doc__ or ""
    assert re.search(r"^Read: .* at [0-9a-f]{8}", text, re.MULTILINE | re.DOTALL)
    assert "\nMissing: " in text


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    try:
        exec(code, {"__name__": __name__})
        found = run({"name": "shortest-first", "chunk": 4}, [Asked(0, 5, 2), Asked(0, 3, 1), Asked(1, 2, 1)])
    finally:
        SCHEDULERS.pop("shortest-first", None)
    assert table(found) == [("B3", "B1"), ("C2", "C1"), ("A4", ""), ("A1", "A1"), ("A1", "A2")]
