"""What can be wrong with a recording that was asked for."""

from __future__ import annotations

from moesim.errors import InputError


class RecordError(InputError):
    """A model, a prompt file or an option of a recording is wrong; nothing was written."""
