"""Values of the engine beside a result: an identification that goes on, or gets another row, simulates only what is new."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from moesim.checked_lines import checked_line, read_checked_line
from moesim.experiment.keys import code_digest
from moesim.identify.predictor import Memo
from moesim.output_folder import OutputFolder

FILE: Final = "engine.jsonl"
OWNER: Final = "calibrate"


@contextmanager
def memo_in(folder: Path | None) -> Iterator[Memo]:
    """Keep values in a folder as soon as they are there; without one, in memory.

    Parameters
    ----------
    folder : Path or None
        Of a result; made if need be.

    Yields
    ------
    Memo
        With the values that are known; damaged lines, and those of another version of the simulator, are not.
    """
    if folder is None:
        yield Memo()
        return
    path = OutputFolder(folder, OWNER).grow(FILE)
    code = code_digest()
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    kept = [line for line in (read_checked_line(line) for line in lines) if line is not None and line.get("code") == code]
    with path.open("ab") as file:
        if lines and not lines[-1].endswith(b"\n"):
            file.write(b"\n")

        def keep(key: str, value: float) -> None:
            file.write(checked_line({"key": key, "value": value, "code": code}))
            file.flush()

        yield Memo({str(line["key"]): float(line["value"]) for line in kept}, keep)
