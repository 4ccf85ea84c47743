"""Write files into a folder without touching a file that moesim did not write."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from moesim.core.atomic import failing_as_one_line, locked
from moesim.core.manifest import FILE, TEMPORARY, Manifest, State, digest_of, entry
from moesim.core.text import say
from moesim.errors import ConfigError, InputError

ASIDE: Final = "_changed."
"""Begins the name of a file that was set aside. Readers of datasets pass over names that begin with an underscore."""


def nearest_folder(folder: Path) -> Path:
    """Give a folder, or the nearest one above it that is there; it is on the disk that takes what is written."""
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
    """Make a folder for a block's scratch files, on the disk that takes a file; a full disk is a `WriteError` about that file."""
    try:
        made = tempfile.TemporaryDirectory(dir=nearest_folder(out.parent), prefix=".moesim-", ignore_cleanup_errors=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"--out {out}: expected a place to write to, got: {reason}; choose another") from None
    with made as folder, failing_as_one_line(out, Path(folder)):
        yield Path(folder)


def check_own_folder(folder: Path, owner: str, *, option: str = "--out") -> None:
    """Make sure that a command may have a folder for itself: it is not there, or empty, or holds an earlier result of it."""
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
        raise ConfigError(f"{folder}: expected a new folder or a result of `moesim {owner}`, got {got}; {remedy}")
    if all(path.name == FILE for path in folder.iterdir()) and not manifest.paths():
        return
    if manifest.damaged:
        got = f"one whose {FILE} is damaged in line {manifest.damaged[0]}"
    elif (folder / "summary.json").is_file() and (folder / "dataset").is_dir():
        got = f"a result of an older version, which has no list of its files ({FILE})"
        remedy = f"move it away, or {remedy}"
    else:
        got = "a folder with other files"
    raise ConfigError(f"{folder}: expected a new folder or a result of `moesim {owner}`, got {got}; {remedy}")


class OutputFolder:
    """The files of a command in a folder.

    Several processes may write into one folder: what each call does, it does alone.
    """

    def __init__(self, folder: Path, by: str, *, owned: bool = True) -> None:
        self.folder = folder
        self._by = by
        self._owner = by if owned else None
        self._told: set[int] = set()
        self._held: bool | None = None  # whether the lock that this process holds works
        self.manifest = Manifest(folder)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Keep other processes from writing into the folder, which is made if need be; calls may be nested."""
        if self._held is not None:
            yield self._held
            return
        with failing_as_one_line(self.folder, self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder) as self._held:
                try:
                    self.manifest.refresh()
                    if self._owner is not None and not (self.manifest.marked and self.manifest.owner == self._owner):
                        _check_mark(self.manifest, self._owner, "choose another folder")
                    if not self.manifest.marked:
                        self.manifest.append([], self._owner)
                    self._tell_damage()
                    yield bool(self._held)
                finally:
                    self._held = None

    def _tell_damage(self) -> None:
        new = [line for line in self.manifest.damaged if line not in self._told]
        self._told.update(new)
        for line in new:
            place = self.folder / FILE
            say(f"moesim: {place}: line {line} is damaged: the file that it names is taken for somebody else's")

    def mark(self) -> None:
        """Make the folder and its list, if they are not there."""
        with self.alone():
            pass

    def put(
        self, files: Mapping[str, bytes | Path], *, last: str | None = None, replace: Collection[str] = (), tidy: bool = True
    ) -> list[Path]:
        """Write files: all of them take their places together, or none does."""
        digests = {name: digest_of(c) if isinstance(c, Path) else hashlib.sha256(c).hexdigest() for name, c in files.items()}
        with self.alone() as alone:
            states = {name: self._state(name, digest) for name, digest in digests.items()}
            self._check_free(states)
            new = [name for name in files if states[name] is not State.OURS or digest_of(self.folder / name) != digests[name]]
            gone = [name for name in replace if name not in files and self.manifest.state(name) is State.OURS]
            if new or gone:
                if last is not None and last not in new:
                    new.append(last)
                self._put({name: files[name] for name in new}, digests, gone, last)
            else:  # the same bytes may stand there without being listed
                self._list(digests)
            if tidy:
                self._tidy(alone)
        return [self.folder / name for name in files]

    def replace(
        self, files: Mapping[str, bytes | Path], *, last: str | None = None, keep: tuple[str, ...] = (), tidy: bool = True
    ) -> list[Path]:
        """Write files as of `put` in the place of all earlier ones of the command, but for `keep` (beginnings of paths)."""
        with self.alone():
            earlier = [name for name in self.manifest.paths(by=self._by) if not name.startswith(keep)]
            return self.put(files, last=last, replace=earlier, tidy=tidy)

    def check_free(self, names: Collection[str], folders: Collection[str] = ()) -> None:
        """Raise `InputError` if something that moesim did not write stands where a file or a folder of files is to be."""
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
        """Tell what stands at a path; what is equal to the new content to the last byte may as well be ours."""
        state = self.manifest.state(name)
        place = self.folder / name
        if state in (State.CHANGED, State.FOREIGN) and place.is_file() and not place.is_symlink() and digest_of(place) == digest:
            return State.OURS
        return state

    def _list(self, digests: Mapping[str, str]) -> None:
        missing = [name for name, digest in digests.items() if not (self.manifest.has(name) and self.manifest.fits(name, digest))]
        if missing:
            self.manifest.append([entry(name, digests[name], self._by) for name in missing], self._owner)

    def _put(
        self, files: Mapping[str, bytes | Path], digests: Mapping[str, str], gone: Collection[str], last: str | None
    ) -> None:
        made = {name: f"{TEMPORARY}{os.urandom(8).hex()}" for name in files}
        self.manifest.append([{"temporary": list(made.values())}], self._owner)
        try:
            for name, content in files.items():
                with _create(self.folder / made[name]) as file:
                    if isinstance(content, Path):
                        with content.open("rb") as source:
                            shutil.copyfileobj(source, file)
                    else:
                        file.write(content)
            self.manifest.append([entry(name, digests[name], self._by) for name in files], self._owner)
            if last is not None:
                self._make_room(last)
            for name in gone:
                self._remove(name)
            for name in sorted(files, key=lambda name: name == last):
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                self._make_room(name, keep=True)
                os.replace(self.folder / made[name], self.folder / name)
        finally:
            for temporary in made.values():
                with suppress(OSError):
                    (self.folder / temporary).unlink(missing_ok=True)

    def _make_room(self, name: str, *, keep: bool = False) -> None:
        """Set a changed file aside; remove one that is ours, unless the new one is to replace it."""
        state = self.manifest.state(name)
        if state is State.CHANGED:
            self._set_aside(name)
        elif state is State.OURS and not keep:
            (self.folder / name).unlink()

    def _set_aside(self, name: str, consequence: str = "") -> None:
        place = self.folder / name
        aside, n = place.with_name(ASIDE + place.name), 1
        while aside.exists() or aside.is_symlink():
            n += 1
            aside = place.with_name(f"{ASIDE}{n}.{place.name}")
        place.rename(aside)
        say(f"moesim: {place}: changed since moesim wrote it{consequence}; kept as {aside.name}")

    def set_aside(self, name: str, consequence: str) -> None:
        """Give a changed file another name, with a line on stderr that says what follows."""
        with self.alone():
            if self.manifest.state(name) is State.CHANGED:
                self._set_aside(name, f", {consequence}")

    def grow(self, name: str) -> Path:
        """List a file that grows, whatever it comes to hold, and give its path."""
        with self.alone():
            if not self.manifest.has(name):
                self._check_free({name: self.manifest.state(name)})
                self.manifest.append([entry(name, None, self._by)], self._owner)
        return self.folder / name

    def note(self, names: Collection[str]) -> None:
        """List files that have just been written by other means."""
        with self.alone() as alone:
            self._list({name: digest_of(self.folder / name) for name in names})
            self._tidy(alone)

    def remove(self, names: Collection[str], *, tidy: bool = True) -> None:
        """Remove files, as far as moesim wrote them and nobody has changed them since."""
        if not self.folder.is_dir():
            return
        with self.alone() as alone:
            for name in names:
                if self.manifest.has(name) and self.manifest.state(name) is State.OURS:
                    self._remove(name)
            if tidy:
                self._tidy(alone)

    def _remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
        for parent in Path(name).parents:
            if parent != Path():
                with suppress(OSError):  # it holds other files
                    (self.folder / parent).rmdir()

    def tidy(self) -> None:
        """Remove what killed processes left in the making, and write the list of files anew without what is gone."""
        if self.folder.is_dir():
            with self.alone() as alone:
                self._tidy(alone)

    def _tidy(self, alone: bool) -> None:
        if not alone:
            return
        with suppress(OSError):  # the list is right without; a disk may be full
            for name in self.manifest.temporary:  # in the making while the lock is held only
                (self.folder / name).unlink(missing_ok=True)
            self.manifest.compact()


def _create(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb")
