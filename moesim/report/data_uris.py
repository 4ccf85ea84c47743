"""Files inside a page."""

from __future__ import annotations

import base64
import gzip
from typing import Final

MAX_PLAIN: Final = 1_000_000
"""Bytes of a CSV that is offered as it is; more is compressed, since browsers refuse to save data URIs of more than 2 MB."""


def data_uri(data: bytes, kind: str) -> str:
    """Write bytes as a data URI.

    >>> data_uri(b"a", "text/plain")
    'data:text/plain;base64,YQ=='
    """
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def csv_uri(name: str, data: bytes) -> tuple[str, str]:
    """Write a CSV as a data URI, compressed if it is large."""
    if len(data) <= MAX_PLAIN:
        return f"{name}.csv", data_uri(data, "text/csv")
    return f"{name}.csv.gz", data_uri(gzip.compress(data, mtime=0), "application/gzip")
