"""Files that grow by checked lines, so that work that was stopped goes on where it was."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from moesim.core.atomic import write_bytes, write_error
from moesim.core.checked_lines import checked_line, read_checked_line
from moesim.core.gate import RESULT, read_bytes
from moesim.core.output_folder import OutputFolder


class Journal:
    """Lines of JSON in a file of an output folder; each is there as soon as it was added, and a kill loses the last at most."""

    def __init__(self, out: OutputFolder, name: str, *, durable: bool = False) -> None:
        self.path = out.folder / name
        self._out, self._name, self._durable = out, name, durable
        self._ready = False

    def read(self) -> list[dict[str, Any] | None]:
        """Read the lines; None stands for a damaged one, and what a kill left of the last line is left out."""
        return [read_checked_line(line) for line in _whole(read_bytes(self.path, RESULT)).splitlines()]

    def begin(self, header: Mapping[str, Any]) -> None:
        """Replace the file with its first line."""
        self._out.grow(self._name)
        write_bytes(self.path, checked_line(header))
        self._ready = True

    def resume(self) -> None:
        """Make sure that lines can be added, and cut off what a kill left of one; `append` does it if need be."""
        self._out.grow(self._name)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.truncate(len(_whole(self.path.read_bytes())))
        self._ready = True

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line."""
        if not self._ready:
            self.resume()
        try:
            with self.path.open("ab") as file:
                file.write(checked_line(line))
                file.flush()
                if self._durable:
                    os.fsync(file.fileno())
        except OSError as error:
            raise write_error(self.path, error) from None

    def remove(self) -> None:
        """Delete the file."""
        self._out.remove([self._name])


def _whole(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]
