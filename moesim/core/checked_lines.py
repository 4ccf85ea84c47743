"""Lines of JSON that carry a check of their own, for files that grow: a damaged line is told from a whole one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

CHECK: Final = "check"


def checked_line(content: Mapping[str, Any]) -> bytes:
    """Write a line.

    >>> read_checked_line(checked_line({"a": 1}))
    {'a': 1}
    >>> read_checked_line(checked_line({"a": 1}).replace(b"1", b"2")) is None
    True
    """
    check = hashlib.sha256(_text(content).encode()).hexdigest()[:32]
    return (_text({**content, CHECK: check}) + "\n").encode()


def read_checked_line(line: bytes) -> dict[str, Any] | None:
    """Read a line, with or without its newline; None if it is damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or CHECK not in found:
        return None
    content = {key: value for key, value in found.items() if key != CHECK}
    return content if checked_line(content) == line.rstrip(b"\n") + b"\n" else None


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))
