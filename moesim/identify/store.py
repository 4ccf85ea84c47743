"""Values of the engine beside a result: an identification that goes on, or gets another row, simulates only what is new."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Final

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
        Of a result; made when the first value is kept.

    Yields
    ------
    Memo
        With the values that are known; damaged lines, and those of another version of the simulator, are not.
    """
    if folder is None:
        yield Memo()
        return
    path = folder / FILE
    code = code_digest()
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    kept = [line for line in (read_checked_line(line) for line in lines) if line is not None and line.get("code") == code]
    with ExitStack() as opened:
        files: list[IO[bytes]] = []

        def keep(key: str, value: float) -> None:
            if not files:  # nothing is made before there is something to keep: rows may yet be refused
                files.append(opened.enter_context(OutputFolder(folder, OWNER).grow(FILE).open("ab")))
                if lines and not lines[-1].endswith(b"\n"):
                    files[0].write(b"\n")
            files[0].write(checked_line({"key": key, "value": value, "code": code}))
            files[0].flush()

        yield Memo({str(line["key"]): float(line["value"]) for line in kept}, keep)
