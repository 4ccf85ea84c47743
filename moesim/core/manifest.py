"""Which files of a folder moesim wrote, and what it wrote into them: a list that is kept in the folder itself.

``.moesim-manifest.jsonl`` has a line for each file: its path, the sha256 of its content, and the command. Each line carries a
check of its own. What is not in the list is somebody else's, whatever its name. Lines are added before files take their
places, so that a kill leaves nothing that cannot be told apart.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

from moesim.core.checked_lines import checked_line, read_checked_line
from moesim.core.gate import RESULT, read_bytes
from moesim.errors import InputError

FILE: Final = ".moesim-manifest.jsonl"
TEMPORARY: Final = ".moesim-"
_VERSION: Final = 1
_BEGINS: Final = b'{"manifest":'
_ABOVE: Final = 3  # folders above a file in which a list may name it


class State(Enum):
    """What stands at a path."""

    ABSENT = "nothing there"
    OURS = "what moesim wrote"
    CHANGED = "a file that moesim wrote and that was changed since"
    FOREIGN = "a file that moesim did not write"


class Manifest:
    """The list of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._forget()
        self.refresh()

    def _forget(self) -> None:
        self.marked = False  # whether there is a list
        self.owner: str | None = None  # command whose result the folder is; None: a folder with files of several commands
        self.temporary: set[str] = set()  # files in the making; of a killed process, if nobody holds the folder's lock
        self.damaged: list[int] = []  # lines that cannot be read
        self._by: dict[str, str] = {}
        self._digests: dict[str, list[str | None]] = {}  # None: a file that grows
        self._read = b""
        self._n_lines = 0

    def refresh(self) -> None:
        """Read what other processes have added since."""
        place = self.folder / FILE
        try:
            if not stat.S_ISREG(place.lstat().st_mode):
                raise InputError(f"{place}: expected a list of files, got a link or no file; move it away")
            content = read_bytes(place, RESULT)
        except (FileNotFoundError, NotADirectoryError):
            self._forget()
            return
        except OSError as error:
            raise InputError(f"{place}: expected to read it, got: {error.strerror}; mend that") from None
        whole = content[: content.rfind(b"\n") + 1]
        if not whole.startswith(self._read):  # written anew
            self._forget()
        for line in whole[len(self._read) :].split(b"\n")[:-1]:
            self._n_lines += 1
            self._take(line)
        self._read = whole
        if not (self.marked or self._digests or self.temporary) and content[: len(_BEGINS)] != _BEGINS[: len(content)]:
            raise InputError(f"{place}: expected a list of files, got something else; move it away")

    def _take(self, line: bytes) -> None:
        found = read_checked_line(line)
        if found is None:
            if line.endswith(b"}"):  # else it is what a kill left of a line, and the file has not taken its place
                self.damaged.append(self._n_lines)
        elif "manifest" in found:
            self.marked, self.owner = found["manifest"] == _VERSION, found["owner"]
        elif "temporary" in found:
            self.temporary.update(name for name in found["temporary"] if name.startswith(TEMPORARY) and "/" not in name)
        elif not Path(found["path"]).is_absolute() and ".." not in Path(found["path"]).parts:
            self._by[found["path"]] = found["by"]
            self._digests.setdefault(found["path"], []).append(found["sha256"])

    # ------------------------------------------------------------------------------------------------------------- reading
    def paths(self, *, by: str | None = None, under: str = "") -> list[str]:
        """Give the paths in the list, sorted: those of a command, below a folder."""
        return sorted(p for p, command in self._by.items() if p.startswith(under) and (by is None or command == by))

    def has(self, path: str) -> bool:
        """Whether the list names a path."""
        return path in self._digests

    def state(self, path: str) -> State:
        """Tell what stands at a path, by its content."""
        place = self.folder / path
        if self.blocked(path) is not None:
            return State.FOREIGN
        try:
            mode = place.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return State.ABSENT
        if path not in self._digests or not stat.S_ISREG(mode):
            return State.FOREIGN
        return State.OURS if self.fits(path, None if None in self._digests[path] else digest_of(place)) else State.CHANGED

    def blocked(self, path: str) -> Path | None:
        """Find the first folder on the way to a path that is a link, or no folder; moesim makes neither."""
        place = self.folder
        for part in Path(path).parts[:-1]:
            place /= part
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                return place
        return None

    def part_of_result(self, path: str) -> bool:
        """Whether a listed path is of the command whose result the folder is."""
        return self.owner is not None and self._by[path] == self.owner

    def fits(self, path: str, digest: str | None) -> bool:
        """Whether a listed file may have a content; any, if it grows."""
        digests = self._digests[path]
        return None in digests or digest in digests

    # ------------------------------------------------------------------------------------------------------------- writing
    def append(self, lines: Iterable[Mapping[str, Any]], owner: str | None) -> None:
        """Add lines, at once and in one piece; the folder's lock must be held. A new list begins with its owner."""
        self.refresh()
        text = b"".join(map(checked_line, lines))
        if not self.marked:
            text = checked_line({"manifest": _VERSION, "owner": owner}) + text
        handle = os.open(self.folder / FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                text = b"\n" + text  # ends what a kill left of a line
            before, left = size, text
            try:
                while left:
                    left = left[os.write(handle, left) :]
            except OSError:
                os.ftruncate(handle, before)
                raise
        finally:
            os.close(handle)
        self.refresh()

    def compact(self) -> None:
        """Write the list anew with one line for each file that is there, sorted; the folder's lock must be held."""
        lines: list[dict[str, Any]] = [{"manifest": _VERSION, "owner": self.owner}]
        for path in self.paths():
            digests = self._digests[path]
            if not (self.folder / path).is_file():
                continue
            if len(set(digests)) > 1 and None not in digests:
                now = digest_of(self.folder / path)
                digests = [now] if now in digests else digests
            lines += [entry(path, digest, self._by[path]) for digest in dict.fromkeys(digests)]
        text = b"".join(map(checked_line, lines))
        if text == (self.folder / FILE).read_bytes():
            return
        if self.owner is None and len(lines) == 1:  # it says nothing any more
            (self.folder / FILE).unlink()
            self.refresh()
            return
        name = f"{TEMPORARY}{os.urandom(8).hex()}"
        self.append([{"temporary": [name]}], self.owner)
        new = self.folder / name
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
                file.write(text)
            os.replace(new, self.folder / FILE)
        finally:
            new.unlink(missing_ok=True)
        self.refresh()


def entry(path: str, digest: str | None, by: str) -> dict[str, Any]:
    """Describe a file: its path, the sha256 of its content (None: it grows), the command."""
    return {"path": path, "sha256": digest, "by": by}


def digest_of(path: Path) -> str:
    """Give the sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_verified(path: Path) -> bytes:
    """Read a file, and make sure that it holds what moesim wrote, if a list in its folder or one above says what that was."""
    data = read_bytes(path, RESULT)
    check_verified(path, hashlib.sha256(data).hexdigest())
    return data


def check_verified(path: Path, digest: str | None = None) -> None:
    """Raise `InputError` if a list names a file and its content is another; `digest` is that of the content, if it is known."""
    found = listing(path)
    if found is None:
        return
    manifest, name = found
    if not manifest.fits(name, digest or digest_of(path)):
        raise InputError(
            f"{path}: expected what moesim wrote, got another content (the sha256 in {FILE} differs); "
            "run the command that wrote it again"
        )


def listing(path: Path) -> tuple[Manifest, str] | None:
    """Find the list that names a file, in its folder or one above, and its path there; None if none does."""
    place = path.absolute()
    for folder in list(place.parents)[:_ABOVE]:
        if (folder / FILE).is_file():
            manifest, name = Manifest(folder), place.relative_to(folder).as_posix()
            if manifest.has(name):
                return manifest, name
    return None
