"""Text from files, made harmless: on a terminal, and in a table that a spreadsheet opens."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any, Final

TURNING: Final = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that turn the direction of reading, so that a text looks like another one."""

_NUMBER = re.compile(r"[+-]([0-9.]+([eE][+-]?[0-9]+)?( ?[A-Za-z%*!]+)*)?")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")  # with which a cell begins that a spreadsheet computes


def steering(text: str) -> str | None:
    """Find the first character that would steer a terminal or turn the reading."""
    if text.isprintable():
        return None
    return next((c for c in text if c in TURNING or (c not in "\n\r\t" and (c < " " or "\x7f" <= c < "\xa0"))), None)


def shown(text: str) -> str:
    r"""Write what would steer a terminal, or break a line, as an escape.

    >>> shown("a\x1b[31mb\n")
    'a\\x1b[31mb\\n'
    """
    if text.isprintable():
        return text
    return "".join(c.encode("unicode_escape").decode() if c in "\n\r\t\u2028\u2029" or steering(c) else c for c in text)


def shown_lines(text: str) -> str:
    """Write each line of a text as `shown` does."""
    return "\n".join(map(shown, text.split("\n")))


LOG: Final = logging.getLogger("moesim")
"""What functions report besides their results. Silent unless the program that calls them, as the commands do, adds a handler."""
LOG.addHandler(logging.NullHandler())
PROGRESS: Final = logging.getLogger("moesim.progress")
"""How far something is, where no bar can be drawn."""


def say(line: str) -> None:
    """Print a remark of a command on stderr, unless only errors are asked for."""
    if LOG.isEnabledFor(logging.WARNING):
        complain(line)


def complain(line: str) -> None:
    """Print an error of a command on stderr."""
    print(shown(line), file=sys.stderr)


def note(line: str) -> None:
    """Log a line for the user of a function; commands print it on stderr."""
    LOG.warning("%s", shown(line))


def explain(line: str, *values: object) -> None:
    """Log which file or way was chosen, and for which reason; commands print it with ``--verbose``."""
    LOG.info(line, *values)


def cell(value: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would compute.

    >>> cell("=1+2"), cell("-3.2 %"), cell(-3), cell("-"), cell("lru")
    ("'=1+2", '-3.2 %', -3, '-', 'lru')
    """
    if not isinstance(value, str) or not value.lstrip(" ").startswith(_FORMULA) or _NUMBER.fullmatch(value):
        return value
    return f"'{value}"


def uncell(value: Any) -> Any:
    """Undo `cell`.

    >>> uncell(cell("=1+2")), uncell("'tis"), uncell(3)
    ('=1+2', "'tis", 3)
    """
    return value[1:] if isinstance(value, str) and value.startswith("'") and cell(value[1:]) == value else value
