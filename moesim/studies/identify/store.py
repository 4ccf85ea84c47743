"""Values of the engine beside a result: an identification that goes on, or gets another row, simulates only what is new."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from moesim.core.journal import Journal
from moesim.core.output_folder import OutputFolder
from moesim.experiment.keys import code_digest
from moesim.studies.identify.predictor import Memo

FILE: Final = "engine.jsonl"
OWNER: Final = "calibrate"


@contextmanager
def memo_in(folder: Path | None) -> Iterator[Memo]:
    """Keep values in a folder as soon as they are there; without one, in memory."""
    if folder is None:
        yield Memo()
        return
    journal = Journal(OutputFolder(folder, OWNER), FILE)
    code = code_digest()
    lines = journal.read() if journal.path.is_file() else []
    known = {str(line["key"]): float(line["value"]) for line in lines if line is not None and line.get("code") == code}
    # Nothing is made before there is something to keep: rows may yet be refused.
    yield Memo(known, lambda key, value: journal.append({"key": key, "value": value, "code": code}))
