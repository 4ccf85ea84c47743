"""A progress bar for what takes longer than two seconds, and a line for what has no end in sight; on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from moesim.text import shown

_DELAY_S = 2.0
_EVERY_S = 0.1


class Progress:
    """Counts steps; shows a bar on stderr once that has taken two seconds.

    Parameters
    ----------
    total : int
        Steps in all.
    enabled : bool
        False, or a stderr that is no terminal, shows nothing.
    """

    def __init__(self, total: int, *, enabled: bool = True) -> None:
        self.done = 0
        self._total = total
        self._enabled = enabled and sys.stderr.isatty()
        self._text = ""
        self._began = self._drawn = time.monotonic()
        self._bar: RichProgress | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def describe(self, text: str) -> None:
        """Say what is being done."""
        self._text = shown(text)

    def advance(self, steps: int) -> None:
        """Count steps."""
        self.done += steps
        if not self._enabled:
            return
        now = time.monotonic()
        if now - self._began < _DELAY_S or now - self._drawn < _EVERY_S:
            return
        self._drawn = now
        if self._bar is None:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
            self._bar = RichProgress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._bar.add_task("", total=self._total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=self.done, description=self._text)


@contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """Show what is being done, which may never end; on a terminal only.

    Yields
    ------
    callable
        Takes what is being done now.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(Text(shown(text)))
