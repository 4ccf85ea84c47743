"""Facts of a thing: a row of ``moesim list``, and a table in a notebook."""

from __future__ import annotations

from html import escape
from typing import Any


class Facts:
    """Something that states its facts."""

    __slots__ = ()

    def facts(self) -> dict[str, Any]:
        """State them by name, as ``moesim list`` shows them."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        def cell(value: Any) -> str:
            return escape(", ".join(map(str, value)) if isinstance(value, list) else str(value))

        rows = "".join(f"<tr><th>{escape(name)}</th><td>{cell(value)}</td></tr>" for name, value in self.facts().items())
        return f'<table style="text-align: left"><tbody>{rows}</tbody></table>'
