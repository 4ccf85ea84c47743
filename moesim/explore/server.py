"""The server of the page: on this machine alone."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from nicegui import app, background_tasks, ui
from starlette.middleware.trustedhost import TrustedHostMiddleware

from moesim.core.text import say
from moesim.errors import ConfigError
from moesim.explore.page import Page

HOST: Final = "127.0.0.1"


def serve(folder: str | None, port: int, *, browser: bool) -> None:
    """Serve the page until interrupted; port 0 takes any free one."""
    port = _free(port)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])  # no other site's name may lead here
    app.on_startup(lambda: background_tasks.create(_announce(port)) and None)
    ui.run(
        lambda: Page(folder) and None, host=HOST, port=port, title="moesim explore", show=browser, reload=False,
        show_welcome_message=False, uvicorn_logging_level="warning",
    )  # fmt: skip


async def _announce(port: int) -> None:
    """Print the address once something answers there, which is after all that is called at start-up."""
    while True:
        try:
            _, writer = await asyncio.open_connection(HOST, port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return say(f"moesim explore: http://{HOST}:{port} (Ctrl-C ends it)")


def _free(port: int) -> int:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((HOST, port))
        except OSError:
            raise ConfigError(f"explore: --port: expected a free port, got {port}, which is taken; name another, or 0") from None
        return int(one.getsockname()[1])
