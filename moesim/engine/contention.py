"""Rates of activities that overlap (rule 9).

Work is counted in millionths of a nanosecond at full rate, and rates in parts per million. All arithmetic is then exact in
integers. An activity with ``work`` ns left at rate ``r`` ends after ``ceil(work * 10**6 / r)`` ns. A change of rate conserves
what is left.

A pair of a processor's experts and a link is about memory bandwidth. Its rates are those of experts that only read weights. An
expert with many rows computes for longer than it reads; ``share`` is the part of its time that reading takes. Such an expert is
slowed only where reading at the reduced rate takes longer than computing. It leaves the link what it does not draw: the link's
loss is taken as proportional to what the expert reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simpy.events import Timeout

from moesim.hardware import HardwareProfile

FULL = 1_000_000


class Server:
    """What does one thing at a time: a lane of a device, or a link."""

    __slots__ = ("activity", "alarm", "end", "last", "left", "over", "rate", "share")

    def __init__(self) -> None:
        self.activity: str | None = None  # what it does at present, if others may slow it down
        self.end = 0  # when that ends, as things stand
        self.left = 0  # work left at `last`, in millionths of ns
        self.last = 0
        self.rate = FULL
        self.share = FULL  # of its time that reading memory takes, in millionths
        self.alarm: Any = None  # the valid alarm, an event of SimPy
        self.over: Any = None  # called with the alarm

    def done(self, work_ns: int, start: int, now: int) -> int:
        """Return what is done of its work, which began at `start`, in millionths of ns."""
        if self.activity is None:  # nothing slows it down
            return (now - start) * FULL
        return work_ns * FULL - self.left + (now - self.last) * self.rate


class Contention:
    """All measured pairs, and which contended activities go on at present.

    A change of rate makes a new alarm; the old one still rings, and is passed over.
    """

    def __init__(self, hardware: HardwareProfile, env: Any) -> None:
        self.env = env
        self.partners: dict[str, dict[str, int]] = {}  # activity -> {other: rate of activity while other goes on}
        self.active: dict[str, list[Server]] = {}
        self._links = {link.name for link in hardware.links}
        for pair in hardware.contention:
            self.partners.setdefault(pair.a, {})[pair.b] = pair.a_rate_ppm
            self.partners.setdefault(pair.b, {})[pair.a] = pair.b_rate_ppm

    def begin(self, server: Server, activity: str, work_ns: int, over: Callable[[Any], None], share: int = FULL) -> None:
        """Start an activity that takes `work_ns` alone, `share` millionths of it to read memory; then call ``over(alarm)``."""
        server.over = over
        server.activity, server.share, server.rate = activity, share, FULL
        server.left, server.last = work_ns * FULL, self.env.now
        partners = self.partners.get(activity)
        if partners is None:
            self._schedule(server)
            return
        server.rate = self._rate_of(server)
        self._schedule(server)
        self.active.setdefault(activity, []).append(server)
        self._touch(partners)

    def _on_alarm(self, event: Any) -> None:
        server: Any = event._value
        if event is not server.alarm:  # its end has moved since
            return
        activity, server.activity = server.activity, None
        partners = self.partners.get(activity)
        if partners is not None:
            self.active[activity].remove(server)
            self._touch(partners)
        server.over(event)

    def _touch(self, partners: dict[str, int]) -> None:
        for name in partners:
            for server in self.active.get(name, ()):
                self._set_rate(server, self._rate_of(server))

    def _set_rate(self, server: Server, rate: int) -> None:
        if rate == server.rate:
            return
        now = self.env.now
        server.left -= (now - server.last) * server.rate
        server.last = now
        server.rate = rate
        if server.left > 0:  # else its end is due at this very instant
            self._schedule(server)

    def _schedule(self, server: Server) -> None:
        delay = -(-server.left // server.rate)
        server.end = server.last + delay
        server.alarm = Timeout(self.env, delay, server)
        server.alarm.callbacks.append(self._on_alarm)

    def _rate_of(self, server: Server) -> int:
        """Return the smallest rate that the other activities leave a server."""
        activity = server.activity
        assert activity is not None
        rate = FULL
        for other, slowed in self.partners[activity].items():
            if slowed >= rate:
                continue
            others = self.active.get(other)
            if not others:
                continue
            if other in self._links:
                rate = min(rate, slowed * FULL // server.share)
            elif activity in self._links:
                reading = self.partners[other][activity]  # what of its full rate a partner that only reads keeps
                drawn = min(reading, max(one.share for one in others))
                rate = min(rate, FULL - (FULL - slowed) * drawn // reading)
            else:
                rate = slowed
        return rate
