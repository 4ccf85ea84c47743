"""Files that moesim writes: whole or not at all, listed, never over a stranger's.

A folder's list, ``.moesim-manifest.jsonl``, has its command, then a line a file: path, sha256 (none: it grows), command.
Files added while a sweep runs carry their digest in the name (`self_named`). Nothing is synced: a file that a power cut
left incomplete lacks its digest and counts as changed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import IO, Any, Final

from moesim.core.gate import RESULT, read_bytes
from moesim.core.text import note
from moesim.errors import ConfigError, InputError, WriteError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_DISKS = (*FULL, errno.EIO, errno.EROFS, errno.ESTALE)  # what writing to an open file can end in


# ------------------------------------------------------------ one file
def write_bytes(path: str | Path, data: bytes) -> Path:
    """Write a file so that no reader ever sees a part of it."""
    with writing(path) as file:
        file.write(data)
    return Path(path)


@contextmanager
def writing(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that takes its place only if the block ends without an error."""
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        if error.errno in FULL:
            raise write_error(target, error) from None
        raise InputError(f"{target}: expected a file that can be written, got: {error.strerror}; choose another place") from None
    try:
        with failing_as_one_line(target, Path(name)):
            with os.fdopen(handle, "wb") as file:
                yield file
            os.umask(mask := os.umask(0))
            os.chmod(name, 0o666 & ~mask)  # mkstemp makes it private
            os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


@contextmanager
def failing_as_one_line(target: Path, inside: Path) -> Iterator[None]:
    """Turn a disk's errors in a block into a `WriteError`; errors about other files stay."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            if error.errno not in _OF_DISKS:
                raise
            raise write_error(target, error) from None
        path = None if isinstance(error.filename, int) else Path(os.fsdecode(error.filename))
        if path is None or not path.is_relative_to(inside):
            raise
        named = target == inside and not path.name.startswith(".")  # the name of a file in the making says nothing
        raise write_error(path if named else target, error) from None


def write_error(target: Path, error: OSError | InputError) -> WriteError:
    """Make the error of a file that could not be written."""
    full = isinstance(error, OSError) and error.errno in FULL
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).removeprefix(f"{target}: ")
    remedy = "make room" if full else "fix that"
    return WriteError(f"{target}: expected to write it, got: {reason}; {remedy}, and run the same command again")


@contextmanager
def locked(folder: Path, *, shared: bool = False) -> Iterator[bool]:
    """Keep other processes of this machine out of a folder; a killed one keeps nobody waiting."""
    handle = os.open(folder, os.O_RDONLY) if fcntl is not None else None
    held = False
    try:
        if handle is not None:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
                held = True
        yield held
    finally:
        if handle is not None:
            os.close(handle)


def nearest_folder(folder: Path) -> Path:
    """Return a folder or the nearest one above it that exists, which is on the same disk."""
    for near in (absolute := folder.absolute(), *absolute.parents):
        if near.is_dir():
            return near
        if near.is_symlink() and not near.exists():
            raise FileNotFoundError(errno.ENOENT, f"{near} is a link to {os.readlink(near)}, where nothing is")
        if near.exists():
            raise NotADirectoryError(errno.ENOTDIR, f"{near} is a file")
    raise FileNotFoundError(errno.ENOENT, f"nothing above {folder} is there")


@contextmanager
def scratch_beside(out: Path) -> Iterator[Path]:
    """Make a scratch folder on the disk of a file, whose error a full disk becomes."""
    try:
        made = tempfile.TemporaryDirectory(dir=nearest_folder(out.parent), prefix=".moesim-", ignore_cleanup_errors=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"--out {out}: expected a place to write to, got: {reason}; choose another") from None
    with made as folder, failing_as_one_line(out, Path(folder)):
        yield Path(folder)


# ------------------------------------------------------------ lines that check themselves
CHECK: Final = "check"


def checked_line(content: Mapping[str, Any]) -> bytes:
    """Write a line of JSON with a check of its own, by which a damaged line is noticed.

    >>> read_checked_line(checked_line({"a": 1}))
    {'a': 1}
    >>> read_checked_line(checked_line({"a": 1}).replace(b"1", b"2")) is None
    True
    """
    check = hashlib.sha256(_compact(content).encode()).hexdigest()[:32]
    return (_compact({**content, CHECK: check}) + "\n").encode()


def read_checked_line(line: bytes) -> dict[str, Any] | None:
    """Read a line, with or without its newline; None if it is damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or CHECK not in found:
        return None
    content = {key: value for key, value in found.items() if key != CHECK}
    return content if checked_line(content) == line.rstrip(b"\n") + b"\n" else None


def _compact(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))


class Journal:
    """Lines of JSON in a file of an output folder; a kill loses the last line at most."""

    def __init__(self, out: OutputFolder, name: str, *, durable: bool = False) -> None:
        self.path = out.folder / name
        self._out, self._name, self._durable = out, name, durable
        self._ready = False

    def read(self) -> list[dict[str, Any] | None]:
        """Read the lines; None stands for a damaged one, and a last incomplete line is left out."""
        return [read_checked_line(line) for line in _whole_lines(read_bytes(self.path, RESULT)).splitlines()]

    def begin(self, header: Mapping[str, Any]) -> None:
        self._out.grow(self._name)
        write_bytes(self.path, checked_line(header))
        self._ready = True

    def resume(self) -> None:
        """Cut off an incomplete last line, so that lines can be added."""
        self._out.grow(self._name)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.truncate(len(_whole_lines(self.path.read_bytes())))
        self._ready = True

    def append(self, line: Mapping[str, Any]) -> None:
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
        self._out.remove([self._name])


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


# ------------------------------------------------------------ the list of a folder
FILE: Final = ".moesim-manifest.jsonl"
_VERSION: Final = 1
_BEGINS: Final = b'{"manifest":'
_ABOVE: Final = 3  # folders above a file in which a list may name it


class State(Enum):
    """State of a path."""

    ABSENT = "nothing there"
    OURS = "what moesim wrote"
    CHANGED = "a file that moesim wrote and that was changed since"
    FOREIGN = "a file that moesim did not write"


class Manifest:
    """The list of a folder: whose result it is, its files, and their possible contents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refresh()

    def refresh(self) -> None:
        self.marked = False  # whether there is a list
        self.owner: str | None = None  # command whose result the folder is; None: a folder with files of several commands
        self.damaged: list[int] = []  # lines that cannot be read
        self._by: dict[str, str] = {}
        self._digests: dict[str, list[str | None]] = {}  # more than one while files take their places; None: a file that grows
        place = self.folder / FILE
        try:
            if not stat.S_ISREG(place.lstat().st_mode):
                raise InputError(f"{place}: expected a list of files, got a link or no file; move it away")
            content = read_bytes(place, RESULT)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise InputError(f"{place}: expected to read it, got: {error.strerror}; fix that") from None
        for number, line in enumerate(content.split(b"\n"), 1):
            found = read_checked_line(line)
            if found is None:
                self.damaged += [number] if line.endswith(b"}") else []  # else what a kill left of a line
            elif "manifest" in found:
                self.marked, self.owner = found["manifest"] == _VERSION, found["owner"]
            elif "path" in found and not Path(found["path"]).is_absolute() and ".." not in Path(found["path"]).parts:
                self._by[found["path"]] = found["by"]
                self._digests.setdefault(found["path"], []).append(found["sha256"])
        if not (self.marked or self._digests) and content[: len(_BEGINS)] != _BEGINS[: len(content)]:
            raise InputError(f"{place}: expected a list of files, got something else; move it away")

    def paths(self, *, by: str | None = None, under: str = "") -> list[str]:
        return sorted(p for p, command in self._by.items() if p.startswith(under) and (by is None or command == by))

    def has(self, path: str) -> bool:
        return path in self._digests

    def part_of_result(self, path: str) -> bool:
        """Whether a listed path is of the command whose result the folder is."""
        return self.owner is not None and self._by[path] == self.owner

    def fits(self, path: str, digest: str | None) -> bool:
        """Whether a listed file may have a content; any, if it grows."""
        digests = self._digests[path]
        return None in digests or digest in digests

    def blocked(self, path: str) -> Path | None:
        """Find the first folder on the way to a path that is a link or no folder."""
        place = self.folder
        for part in Path(path).parts[:-1]:
            place /= part
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                return place
        return None

    def state(self, path: str) -> State:
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

    def take(self, digests: Mapping[str, str | None], by: str) -> None:
        """Add contents that files may have from now on; the folder's lock must be held."""
        for path, digest in digests.items():
            self._by[path] = by
            self._digests.setdefault(path, []).append(digest)
        self.save()

    def settle(self) -> None:
        """Keep each file's present content, and forget missing files; the lock must be held."""
        for path in self.paths():
            if not (self.folder / path).is_file():
                del self._by[path], self._digests[path]
            elif len(set(self._digests[path])) > 1 and None not in self._digests[path]:
                now = digest_of(self.folder / path)
                self._digests[path] = [now] if now in self._digests[path] else self._digests[path]
        self.save()

    def save(self) -> None:
        place = self.folder / FILE
        lines: list[dict[str, Any]] = [{"manifest": _VERSION, "owner": self.owner}]
        for path in self.paths():
            lines += [{"path": path, "sha256": one, "by": self._by[path]} for one in dict.fromkeys(self._digests[path])]
        text = b"".join(map(checked_line, lines))
        if self.owner is None and len(lines) == 1 and self.marked:  # it says nothing any more
            place.unlink(missing_ok=True)
            self.marked = False
        elif not place.is_file() or place.read_bytes() != text:
            temporary = _create(self.folder, text)
            try:
                os.replace(temporary, place)
            finally:
                temporary.unlink(missing_ok=True)
            self.marked, self.damaged = True, []


def digest_of(path: Path) -> str:
    """Return the sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def self_named(name: str, data: bytes, suffix: str) -> str:
    """Return the name of a file that carries the digest of its content, and so needs no list."""
    return f"{name}-{hashlib.sha256(data).hexdigest()[:16]}{suffix}"


def named_so(path: Path, data: bytes) -> bool:
    """Whether a file has the content that its name promises (`self_named`)."""
    return path.stem.rpartition("-")[2] == hashlib.sha256(data).hexdigest()[:16]


def read_verified(path: Path) -> bytes:
    """Read a file and compare it with the list that names it, if there is one."""
    data = read_bytes(path, RESULT)
    check_verified(path, hashlib.sha256(data).hexdigest())
    return data


def check_verified(path: Path, digest: str | None = None) -> None:
    """Raise `InputError` if a list names a file with another content (`digest`, if it is known)."""
    found = listing(path)
    if found is not None and not found[0].fits(found[1], digest or digest_of(path)):
        raise InputError(
            f"{path}: expected what moesim wrote, got another content (the sha256 in {FILE} differs); "
            "run the command that wrote it again"
        )


def listing(path: Path) -> tuple[Manifest, str] | None:
    """Find the list that names a file, in its folder or one above, and its path there."""
    place = path.absolute()
    for folder in list(place.parents)[:_ABOVE]:
        if (folder / FILE).is_file():
            manifest, name = Manifest(folder), place.relative_to(folder).as_posix()
            if manifest.has(name):
                return manifest, name
    return None


# ------------------------------------------------------------ files into a folder
ASIDE: Final = "_changed."
"""Begins the name of a file that was set aside. Readers of datasets pass over names that begin with an underscore."""
_TEMPORARY: Final = re.compile(r"\.moesim-[0-9a-f]{16}")  # files in the making; of a killed process, if nobody holds the lock


def check_own_folder(folder: Path, owner: str, *, option: str = "--out") -> None:
    """Check that a command may have a folder: absent, empty, or an earlier result of it."""
    other = f"choose another with {option}"
    try:
        with tempfile.TemporaryFile(dir=nearest_folder(folder)):
            pass  # only trying tells: permissions say nothing to root, nor of a read-only disk
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{folder}: expected a folder that can be written, got: {reason}; {other}") from None
    if folder.exists():
        _check_mark(Manifest(folder), owner, other)


def _check_mark(manifest: Manifest, owner: str, remedy: str) -> None:
    folder = manifest.folder
    if manifest.marked and manifest.owner == owner:
        return
    if manifest.marked and manifest.owner is not None:
        got = f"one of `moesim {manifest.owner}`"
    elif all(path.name == FILE or _TEMPORARY.fullmatch(path.name) for path in folder.iterdir()) and not manifest.paths():
        return
    elif manifest.damaged:
        got = f"one whose {FILE} is damaged in line {manifest.damaged[0]}"
    elif (folder / "summary.json").is_file() and (folder / "dataset").is_dir():
        got = f"a result of an older version, which has no list of its files ({FILE})"
        remedy = f"move it away, or {remedy}"
    else:
        got = "a folder with other files"
    raise ConfigError(f"{folder}: expected a new folder or a result of `moesim {owner}`, got {got}; {remedy}")


class OutputFolder:
    """The files of a command in a folder, its own or shared (not `owned`); calls hold its lock."""

    def __init__(self, folder: Path, by: str, *, owned: bool = True) -> None:
        self.folder = folder
        self._by = by
        self._owner = by if owned else None
        self._reported: set[int] = set()  # damaged lines
        self._held: bool | None = None  # whether the lock that this process holds works
        self.manifest = Manifest(folder)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Hold the lock of the folder, which is made if need be; calls may be nested."""
        if self._held is not None:
            yield self._held
            return
        with failing_as_one_line(self.folder, self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder) as self._held:
                try:
                    self._enter()
                    yield self._held
                finally:
                    self._held = None

    def _enter(self) -> None:
        found = self.manifest
        found.refresh()
        if self._owner is not None and not (found.marked and found.owner == self._owner):
            _check_mark(found, self._owner, "choose another folder")
        if not found.marked:
            found.owner = self._owner
            found.save()
        for line in found.damaged:
            if line not in self._reported:
                note(f"moesim: {self.folder / FILE}: line {line} is damaged: the file that it names is taken for somebody else's")
        self._reported.update(found.damaged)

    def mark(self) -> None:
        with self.alone():
            pass

    def put(self, files: Mapping[str, bytes | Path], *, last: str | None = None, replace: Collection[str] = ()) -> list[Path]:
        """Write files: all take their places together, or none does."""
        digests = {name: digest_of(c) if isinstance(c, Path) else hashlib.sha256(c).hexdigest() for name, c in files.items()}
        with self.alone():
            states = {name: self._state(name, digest) for name, digest in digests.items()}
            self._check_free(states)
            new = [name for name in files if states[name] is not State.OURS or digest_of(self.folder / name) != digests[name]]
            gone = [name for name in replace if name not in files and self.manifest.state(name) is State.OURS]
            if (new or gone) and last is not None and last not in new:
                new.append(last)
            made: dict[str, Path] = {}
            try:
                for name in new:
                    made[name] = _create(self.folder, files[name])
                unknown = [name for name in digests if not (self.manifest.has(name) and self.manifest.fits(name, digests[name]))]
                if unknown:  # those of the new ones, and what stands there already without being listed
                    self.manifest.take({name: digests[name] for name in unknown}, self._by)
                if new and last is not None:
                    self._make_room(last)
                for name in gone:
                    self._remove(name)
                for name in sorted(new, key=lambda name: name == last):
                    (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                    self._make_room(name, keep=True)
                    os.replace(made[name], self.folder / name)
            finally:
                for temporary in made.values():
                    with suppress(OSError):
                        temporary.unlink(missing_ok=True)
            self.tidy()
        return [self.folder / name for name in files]

    def replace(self, files: Mapping[str, bytes | Path], *, last: str | None = None, keep: tuple[str, ...] = ()) -> list[Path]:
        """Write files as `put`, for all earlier ones of the command but `keep` (prefixes)."""
        with self.alone():
            earlier = [name for name in self.manifest.paths(by=self._by) if not name.startswith(keep)]
            return self.put(files, last=last, replace=earlier)

    def add(self, name: str, data: bytes) -> None:
        """Write a file that is named by its content (`self_named`), which is not listed."""
        with self.alone():
            self._check_way(name)
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            temporary = _create(self.folder, data)
            try:
                os.replace(temporary, self.folder / name)
            finally:
                temporary.unlink(missing_ok=True)

    def check_free(self, names: Collection[str], folders: Collection[str] = ()) -> None:
        """Raise `InputError` if a stranger's file stands where a file or folder is to be."""
        self.manifest.refresh()
        for folder in folders:
            self._check_way(f"{folder}/file")
        self._check_free({name: self.manifest.state(name) for name in names})

    def _check_way(self, name: str) -> None:
        if (found := self.manifest.blocked(name)) is not None:
            what = f"a link to {os.readlink(found)}" if found.is_symlink() else "a file"
            raise InputError(f"{found}: expected a folder or nothing there, got {what}; move it away or choose another place")

    def _check_free(self, states: Mapping[str, State]) -> None:
        others = (State.FOREIGN,) if self._owner is not None else (State.FOREIGN, State.CHANGED)
        for name, state in states.items():
            if state in others:
                self._check_way(name)
                damaged = self.manifest.damaged
                lost = f" (line {damaged[0]} of {FILE} is damaged)" if damaged else ""
                raise InputError(
                    f"{self.folder / name}: expected nothing there, or what moesim wrote, got {state.value}{lost}; "
                    "move it away, or choose another place"
                )

    def _state(self, name: str, digest: str) -> State:
        """Return what stands at a path; a file equal to the new content counts as ours."""
        state = self.manifest.state(name)
        place = self.folder / name
        if state in (State.CHANGED, State.FOREIGN) and place.is_file() and not place.is_symlink() and digest_of(place) == digest:
            return State.OURS
        return state

    def _make_room(self, name: str, *, keep: bool = False) -> None:
        """Set a changed file aside; remove one that is ours, unless the new one replaces it."""
        state = self.manifest.state(name)
        if state is State.CHANGED:
            self.set_aside(name)
        elif state is State.OURS and not keep:
            (self.folder / name).unlink()

    def set_aside(self, name: str, consequence: str = "") -> None:
        with self.alone():
            place = self.folder / name
            aside, n = place.with_name(ASIDE + place.name), 1
            while aside.exists() or aside.is_symlink():
                n += 1
                aside = place.with_name(f"{ASIDE}{n}.{place.name}")
            with suppress(FileNotFoundError):  # another process has done it
                place.rename(aside)
                then = f", {consequence}" if consequence else ""
                note(f"moesim: {place}: changed since moesim wrote it{then}; kept as {aside.name}")

    def grow(self, name: str) -> Path:
        with self.alone():
            if not self.manifest.has(name):
                self._check_free({name: self.manifest.state(name)})
                self.manifest.take({name: None}, self._by)
        return self.folder / name

    def note(self, names: Collection[str]) -> None:
        """List files that were just written by other means."""
        with self.alone():
            self.manifest.take({name: digest_of(self.folder / name) for name in names}, self._by)
            self.tidy()

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that moesim wrote and nobody has changed since."""
        if self.folder.is_dir():
            with self.alone():
                for name in names:
                    if self.manifest.has(name) and self.manifest.state(name) is State.OURS:
                        self._remove(name)
                self.tidy()

    def discard(self, names: Iterable[str]) -> None:
        """Remove files of `add` whose content was compared with their name."""
        with self.alone():
            for name in names:
                self._remove(name)

    def _remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
        for parent in Path(name).parents:
            if parent != Path():
                with suppress(OSError):  # it holds other files
                    (self.folder / parent).rmdir()

    def tidy(self) -> None:
        """Remove temporary files of killed processes, and settle the list."""
        if self.folder.is_dir():
            with self.alone() as held, suppress(OSError):  # the list is right without; a disk may be full
                if held:
                    for path in self.folder.iterdir():
                        if _TEMPORARY.fullmatch(path.name):
                            path.unlink(missing_ok=True)
                self.manifest.settle()


def _create(folder: Path, content: bytes | Path) -> Path:
    path = folder / f".moesim-{os.urandom(8).hex()}"
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            if isinstance(content, Path):
                with content.open("rb") as source:
                    shutil.copyfileobj(source, file)
            else:
                file.write(content)
    except BaseException:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise
    return path
