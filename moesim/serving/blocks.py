"""KV cache in blocks: in use by requests, cached after them, or free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesim.core.units import ceil_div
from moesim.errors import SimulationError

if TYPE_CHECKING:
    from moesim.serving.requests import Request

Key = tuple[int, int]  # the prefix that ends with the block, and the block's place in it


@dataclass(slots=True)
class Owned:
    """Blocks of one request, in order."""

    n: int = 0
    written: int = 0  # of them, those that others may read
    keys: dict[int, Key] = field(default_factory=dict)  # of those that others may share, by place


class Blocks:
    """A pool of blocks; what requests leave stays cached until its room is needed, least recently used first.

    A block of a prompt whose hashes are known has one key for all requests that begin alike, so that they share it. Any other
    has a key of its request alone, which finds it again after a preemption.
    """

    def __init__(self, n: int, size: int, *, caching: bool = True) -> None:
        self.n, self.size = n, size  # blocks, tokens of each
        self.caching = caching  # full blocks stay cached, and are shared
        self.free = n
        self.cached: dict[Key, None] = {}  # used by nobody, least recently used first
        self.private = 0  # in use by one request, and not to be shared
        self._users: dict[Key, int] = {}
        self._of: dict[Request, Owned] = {}

    @property
    def available(self) -> int:
        """Blocks that can be allocated."""
        return self.free + len(self.cached)

    def of(self, request: Request) -> int:
        """Return how many blocks a request has."""
        return self._of[request].n if request in self._of else 0

    def more(self, request: Request, tokens: int) -> int:
        """Return how many further blocks a request needs for so many tokens."""
        return max(0, ceil_div(tokens, self.size) - self.of(request))

    def match(self, request: Request, most: int) -> int:
        """Count the full blocks at its beginning that are there, of the first `most` tokens."""
        if not self.caching or not (request.blocks or request.preempted):
            return 0
        for i in range(most // self.size):
            key = self._key(request, i)
            if key not in self._users and key not in self.cached:
                return i
        return most // self.size

    def idle(self, request: Request, found: int) -> int:
        """Count those of the blocks found that nobody uses: to share them takes room, too."""
        return sum(self._key(request, i) in self.cached for i in range(found))

    def admit(self, request: Request, found: int, tokens: int, written: int | None = None) -> bool:
        """Give a request the blocks found and others for so many tokens; False, and nothing, without room for them."""
        if ceil_div(tokens, self.size) - found + self.idle(request, found) > self.available:
            return False
        owned = self._of[request] = Owned(found, found)
        for i in range(found):
            key = owned.keys[i] = self._key(request, i)
            self.cached.pop(key, None)
            self._users[key] = self._users.get(key, 0) + 1
        return self.grow(request, tokens, written)

    def grow(self, request: Request, tokens: int, written: int | None = None) -> bool:
        """Give a request blocks for so many tokens, of which the first `written` can be read; False without room, and none."""
        need = self.more(request, tokens)
        if need > self.available:
            return False
        for _ in range(need):
            if self.free:
                self.free -= 1
            else:
                del self.cached[next(iter(self.cached))]
        self.private += need
        owned = self._of.setdefault(request, Owned())
        owned.n += need
        if self.caching and request.blocks:
            self._share(request, owned, min(tokens if written is None else written, request.content) // self.size)
        return True

    def _share(self, request: Request, owned: Owned, end: int) -> None:
        for i in range(owned.written, end):
            key = self._key(request, i)
            if key[0] < 0 or key in self._users:  # a second copy of what another computed at the same time stays its own
                continue
            if key in self.cached:
                del self.cached[key]
                self.free += 1
            owned.keys[i] = key
            self._users[key] = 1
            self.private -= 1
        owned.written = max(owned.written, end)

    def release(self, request: Request) -> None:
        """Take a request's blocks back; the last of them is the first to be used again."""
        owned = self._of.pop(request)
        for i in reversed(range(owned.n)):
            key = owned.keys.get(i)
            if key is None:
                self.private -= 1
                key = self._key(request, i) if self.caching and (i + 1) * self.size <= request.computed else None
                if key is None or key in self._users or key in self.cached:
                    self.free += 1
                else:
                    self.cached[key] = None
                continue
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self.cached[key] = None

    def _key(self, request: Request, i: int) -> Key:
        end = (i + 1) * self.size
        if request.blocks and end <= request.content:
            at = (end - 1) // request.block_tokens
            if at < len(request.blocks):
                return request.blocks[at], i
        return -1 - request.number, i

    def check(self) -> None:
        """Raise if blocks were lost or made; SimulationError."""
        used = self.private + len(self._users)
        if used + self.free + len(self.cached) != self.n or min(self.private, self.free) < 0:
            got = f"{used} in use, {self.free} free and {len(self.cached)} cached"
            raise SimulationError(f"KV cache: expected {self.n} blocks, got {got}; report it")
