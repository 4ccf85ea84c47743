"""Recording of routing traces from the real gates of a model (needs the extra ``record``).

Only this package and ``moesim.live`` import torch.
"""

from __future__ import annotations

import os

from moesim.errors import InputError


class RecordError(InputError):
    """A model, a prompt file or an option of a recording is wrong; nothing was written."""


def check_model_name(name: str) -> None:
    """Check that a name is that of a folder or may be one on the Hugging Face hub."""
    path = os.path.expanduser(name)  # unlike those of pathlib, these take any name
    if os.path.isdir(path):
        return
    is_file = os.path.isfile(path)
    got = "a file" if is_file else "nothing there"
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise RecordError(f"{name}: expected a folder with a model, got {got}; check the path")
    if "/" not in name or is_file:
        raise RecordError(f"{name}: expected a folder or a hub name like organisation/name, got {got}; check the name")
