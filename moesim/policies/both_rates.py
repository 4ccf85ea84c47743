"""What the CPU and a link make of their rates while both read the host's memory."""

from __future__ import annotations

from typing import NamedTuple

from moesim.policy import View

MILLION = 1_000_000


class BothRates(NamedTuple):
    """Rates of the CPU and the link, each as a share of its rate alone, while both are busy."""

    cpu: float
    link: float


def both_rates(view: View, cpu: str, gpu: str) -> BothRates:
    """Read the rates off the machine's profile; 1 each where it says nothing about the pair."""
    hardware = view.costs.hardware
    links = {link.name for link in hardware.links if (link.src, link.dst) == (view.host, gpu)}
    for pair in hardware.contention:
        ends = {pair.a: pair.a_rate_ppm, pair.b: pair.b_rate_ppm}
        on_link = links & ends.keys()
        if on_link and f"{cpu}.experts" in ends:
            return BothRates(ends[f"{cpu}.experts"] / MILLION, ends[on_link.pop()] / MILLION)
    return BothRates(1, 1)
