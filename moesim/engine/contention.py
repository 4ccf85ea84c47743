"""Rates of activities that overlap (rule 9).

Work is counted in millionths of a nanosecond at full rate, rates in parts per million, so that all arithmetic is exact
in integers: an activity with ``work`` ns left at rate ``r`` ends after ``ceil(work * 10**6 / r)`` ns, and a change of
rate at any instant conserves what is left.

A pair of a processor's experts and a link is about memory bandwidth, and its rates are those of experts that do nothing but
read weights. An expert with many rows computes for longer than it reads; ``share`` is the part of its time that reading
takes. It is slowed only once reading at the reduced rate takes longer than computing (a roofline whose memory is slower),
and it leaves the link what it does not draw: the link's loss is taken as proportional to what the expert reads.
"""

from __future__ import annotations

from typing import Any

from simpy.events import Timeout

from moesim.hardware import HardwareProfile

FULL = 1_000_000


class Lane:
    """Something that does one thing at a time: a lane of a device, or a link.

    ``activity`` names what it does at present, None when idle. Without contention a start is one Timeout; with it, a
    change of rate makes a new Timeout, and the old one is recognised as stale by its number.
    """

    __slots__ = ("_fired", "_number", "activity", "end", "env", "last", "left", "on_done", "rate", "share", "table")

    def __init__(self, env: Any, table: ContentionTable) -> None:
        self.env = env
        self.table = table
        self.activity: str | None = None
        self.on_done: Any = None  # callback taking the SimPy event
        self.end = 0  # when the present activity ends, as things stand
        self.left = 0  # work left at `last`, in millionths of ns
        self.last = 0
        self.rate = FULL
        self.share = FULL  # of its time that reading memory takes, in millionths
        self._number = 0
        self._fired = self._on_timeout

    def begin(self, activity: str, work_ns: int, share: int = FULL) -> None:
        """Start an activity that takes `work_ns` alone, `share` millionths of it to read memory."""
        self.activity = activity
        self.share = share
        env = self.env
        partners = self.table.partners.get(activity)
        if partners is None:
            self.end = env.now + work_ns
            Timeout(env, work_ns).callbacks.append(self.on_done)
            return
        self.left = work_ns * FULL
        self.last = env.now
        self.rate = self.table.rate_of(self)
        self._schedule()
        self.table.active.setdefault(activity, []).append(self)
        self._touch(partners)

    def finish(self) -> None:
        """Mark the present activity as over; partners may speed up."""
        activity = self.activity
        self.activity = None
        if activity is None:
            return
        partners = self.table.partners.get(activity)
        if partners is not None:
            self.table.active[activity].remove(self)
            self._touch(partners)

    def _touch(self, partners: dict[str, int]) -> None:
        for name in partners:
            for lane in self.table.active.get(name, ()):
                lane.set_rate(self.table.rate_of(lane))

    def set_rate(self, rate: int) -> None:
        if rate == self.rate:
            return
        now = self.env.now
        self.left -= (now - self.last) * self.rate
        self.last = now
        self.rate = rate
        if self.left > 0:  # else its completion is due at this very instant
            self._schedule()

    def _schedule(self) -> None:
        self._number += 1
        delay = -(-self.left // self.rate)
        self.end = self.last + delay
        Timeout(self.env, delay, self._number).callbacks.append(self._fired)

    def _on_timeout(self, event: Any) -> None:
        if event.value == self._number:  # else its end has moved since
            self.on_done(event)


class ContentionTable:
    """All measured pairs, and which contended activities go on at present."""

    def __init__(self, hardware: HardwareProfile) -> None:
        self.partners: dict[str, dict[str, int]] = {}  # activity -> {other: rate of activity while other goes on}
        self.active: dict[str, list[Lane]] = {}
        self._links = {link.name for link in hardware.links}
        for pair in hardware.contention:
            self.partners.setdefault(pair.a, {})[pair.b] = pair.a_rate_ppm
            self.partners.setdefault(pair.b, {})[pair.a] = pair.b_rate_ppm

    def rate_of(self, lane: Lane) -> int:
        """Return the smallest rate that the activities which go on beside a lane's leave it."""
        activity = lane.activity
        assert activity is not None
        rate = FULL
        for other, slowed in self.partners[activity].items():
            if slowed >= rate:
                continue
            beside = self.active.get(other)
            if not beside:
                continue
            if other in self._links:
                rate = min(rate, slowed * FULL // lane.share)
            elif activity in self._links:
                reading = self.partners[other][activity]  # what of its full rate a partner that only reads keeps
                drawn = min(reading, max(one.share for one in beside))
                rate = min(rate, FULL - (FULL - slowed) * drawn // reading)
            else:
                rate = slowed
        return rate
