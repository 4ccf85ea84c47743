"""Ways of running experts in which the runtime's own time differs."""

from __future__ import annotations

from typing import Final

VARIANTS: Final = ("resident", "host", "fetched")
"""Where experts run: resident on the accelerator, on the host, or on the accelerator after they were fetched."""
