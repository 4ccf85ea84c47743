"""Progress on stderr: a bar after two seconds, a status, lines off a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from moesim.core.text import LOG, PROGRESS, shown
from moesim.core.units import format_s

_DELAY_S = 2.0
_EVERY_S = 0.1
_LINES_S = 10.0


class Progress:
    """Counter of steps: a bar after two seconds, at once with a unit; off a terminal, lines."""

    def __init__(
        self, total: int, *, enabled: bool = True, done: int = 0, text: str = "", unit: str = "", lines: bool = False
    ) -> None:
        self.done = self._begun_at = done
        self._total = total
        enabled = enabled and LOG.isEnabledFor(logging.WARNING)
        self._enabled = enabled and (sys.stderr.isatty() or _in_a_notebook())
        self._lines = enabled and not self._enabled
        self._each = lines and self._lines
        self._text = shown(text)
        self._unit = unit
        self._began = self._drawn = time.monotonic()
        self._from = self._drawn + (0 if unit else _DELAY_S)
        self._bar: RichProgress | None = None

    def __enter__(self) -> Progress:
        if self._enabled and self._unit:
            self._draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def describe(self, text: str) -> None:
        self._text = shown(text)
        if self._each:
            self._say()

    def advance(self, steps: int) -> None:
        self.done += steps
        now = time.monotonic()
        if self._enabled and now >= self._from and now - self._drawn >= _EVERY_S:
            self._drawn = now
            self._draw()
        if self._lines and now - self._drawn >= _LINES_S:
            self._say()

    def step(self, index: int) -> None:
        """Count one step, as a callback that gets its index."""
        self.advance(1)

    def leave_out(self, steps: int) -> None:
        """Take steps off the total that are not needed after all."""
        self._total -= steps

    def _say(self) -> None:
        self._drawn = now = time.monotonic()
        done = self.done - self._begun_at
        left = (now - self._began) * (self._total - self.done) / done if done else 0.0
        share = f"{min(100, 100 * self.done // self._total)} %" if self._total else "0 %"
        text = f"{self._text}: " if self._text else ""
        PROGRESS.info(f"{text}{share} done" + (f", {'about ' * (left >= 1)}{format_s(left)} left" if left > 0 else ""))

    def _draw(self) -> None:
        if self._bar is None:
            count = f"{{task.completed}}/{{task.total}} {self._unit}, {{task.fields[speed]}} {self._unit}/s"
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn(count if self._unit else "{task.percentage:>3.0f} %"),
                TimeRemainingColumn(),
            )
            self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task(self._text, total=self._total, completed=self.done, speed="-")
            self._bar.start()
        (task,) = self._bar.tasks
        speed = "-" if task.speed is None else f"{task.speed:.1f}"
        self._bar.update(task.id, completed=self.done, total=self._total, description=self._text, speed=speed)


def _in_a_notebook() -> bool:
    return "ipykernel" in sys.modules and Console(stderr=True).is_jupyter and find_spec("ipywidgets") is not None


@contextmanager
def telling(*, lines: bool = False, enabled: bool = True) -> Iterator[Callable[[str], None]]:
    """Show what is being done; off a terminal only with `lines`, and each thing once."""
    if not (enabled and LOG.isEnabledFor(logging.WARNING) and sys.stderr.isatty()):
        told: set[str] = set()

        def tell(text: str) -> None:
            if text not in told:
                PROGRESS.info(text)
            told.add(text)

        yield tell if lines and enabled else lambda text: None
        return
    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(Text(shown(text)))
