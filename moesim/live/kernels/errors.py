"""What can be wrong with what is to be computed or copied for real."""

from __future__ import annotations

from moesim.errors import InputError


class KernelError(InputError):
    """A model or a precision that cannot be computed for real on this machine; nothing was computed."""
