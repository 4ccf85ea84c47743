"""A bar with tokens/s and time left while recording, on a terminal only."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class RecordingProgress:
    """Counts tokens that went through the model.

    Parameters
    ----------
    what : str
        Shown before the bar.
    total : int
        Tokens if no request ends early.
    done : int
        Tokens of requests recorded before, which do not count for the speed.
    enabled : bool
        False, or a stderr that is no terminal, shows nothing.
    """

    def __init__(self, what: str, total: int, done: int = 0, *, enabled: bool = True) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} tokens, {task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not (enabled and sys.stderr.isatty()),
        )
        self._task = self._bar.add_task(what, total=total, completed=done, speed="-")
        self._total = total

    def __enter__(self) -> RecordingProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, n_tokens: int) -> None:
        """Count tokens."""
        self._bar.advance(self._task, n_tokens)
        speed = self._bar.tasks[0].speed
        self._bar.update(self._task, speed="-" if speed is None else f"{speed:.1f}")

    def leave_out(self, n_tokens: int) -> None:
        """Take tokens off the total that are not generated because a request ended."""
        self._total -= n_tokens
        self._bar.update(self._task, total=self._total)
