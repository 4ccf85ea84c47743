"""``moesim explore``: a page in the browser that shows speeds as sliders move."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.errors import ConfigError, install


def explore(
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="Result to open, as of moesim run --out.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of 127.0.0.1; 0: any that is free.")] = 8137,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Open no browser; print the address.")] = False,
) -> int:
    """Open a page in the browser to explore models and machines.

    Choose model, parts and engine; see speed, limits, timeline and upgrades. Nothing leaves this machine.

    Example: moesim explore results/quickstart
    """
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"explore: {folder}: expected the folder of a result, got none; make one with moesim run --out")
    try:
        from moesim.explore.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "nicegui":
            raise
        raise ConfigError(f"explore: expected the package nicegui, got none; {install('explore')}") from None
    serve(None if folder is None else str(folder), port, browser=not no_browser)
    return 0
