"""Costs of moving things over links."""

from __future__ import annotations

from typing import Self

from moesim.core.limits import CHUNKS
from moesim.core.units import ceil_div, format_bytes
from moesim.errors import HardwareError, unknown_name
from moesim.hardware.costs.curves import copy_ns
from moesim.hardware.costs.parts import Ledger, within_a_day
from moesim.hardware.types import TRANSFERS, HardwareProfile, Link, Transfer
from moesim.model import ModelSpec


class LinkCosts:
    """Costs over links; see `moesim.hardware.costs.CostModel`, which is the whole of it."""

    def __init__(
        self,
        model: ModelSpec,
        hardware: HardwareProfile,
        *,
        transfer: str = "pinned",
        chunk_bytes: int | None = None,
        extrapolate: bool = False,
    ) -> None:
        self.extrapolate = extrapolate
        if transfer not in TRANSFERS:
            raise HardwareError(f"transfer: {unknown_name('kind of transfer', transfer, TRANSFERS)}")
        if chunk_bytes is not None:
            check_chunk(model, chunk_bytes, "chunk_bytes")
        self.model = model
        self.hardware = hardware
        self.transfer = transfer
        self.chunk_bytes = chunk_bytes
        self._prepare()

    def _prepare(self) -> None:
        """Begin with nothing remembered."""
        self._ledger = Ledger(self.hardware)
        self._transfers: dict[tuple[str, int], int] = {}
        self._fetches: dict[tuple[str, str, int, int | None], int] = {}
        self._activations: dict[tuple[str, int], int] = {}
        self._paths: dict[tuple[str, str], tuple[Link, ...]] = {}

    def _of(self, model: ModelSpec) -> Self:
        """Make the same costs of another model."""
        return type(self)(
            model, self.hardware, transfer=self.transfer, chunk_bytes=self.chunk_bytes, extrapolate=self.extrapolate
        )

    def path(self, src: str, dst: str) -> tuple[Link, ...]:
        """Links from one device to another, fewest hops, then by name. Raises `HardwareError` if there is no way."""
        key = (src, dst)
        if key not in self._paths:
            self._paths[key] = self.hardware.path_between(src, dst)
        return self._paths[key]

    def transfer_ns(self, link: Link, n_bytes: int) -> int:
        """Time of one piece of weights over one link: latency + bytes / rate, rounded up, ns."""
        key = (link.name, n_bytes)
        if key not in self._transfers:
            curve = link.curves.get(self.transfer)
            if curve is None:
                have = ", ".join(link.curves)
                raise HardwareError(
                    f"{self.hardware.path}: links.{link.name}: expected a curve '{self.transfer}', got only {have}; "
                    f"add it or choose transfer: {next(iter(link.curves))}"
                )
            self._transfers[key] = self._over(curve, n_bytes, f"transfer {self.transfer} {link.name}")
        return self._transfers[key]

    def latency_ns(self, link: Link, of_activations: bool = False) -> int:
        """Time of a copy before its first byte moves, ns; 0 of measured points, which do not say."""
        if of_activations:
            curve = link.activation or next(iter(link.curves.values()))
        else:
            curve = link.curves[self.transfer]
        return 0 if curve.points else round(curve.latency_us * 1000)

    def fetch_ns(self, src: str, dst: str, n_bytes: int | None = None, layer: int = 0) -> int:
        """Time to copy one expert between two devices when nothing else moves."""
        key = (src, dst, layer if n_bytes is None else -1, n_bytes)
        if key not in self._fetches:
            size = self.model.expert_bytes(layer) if n_bytes is None else n_bytes
            self._fetches[key] = sum(self.hop_ns(link, size) for link in self.path(src, dst))
        return self._fetches[key]

    def next_bytes(self, n_bytes: int) -> int:
        """Bytes of the next chunk of a transfer that has so many left."""
        return n_bytes if self.chunk_bytes is None else min(n_bytes, self.chunk_bytes)

    def hop_ns(self, link: Link, n_bytes: int) -> int:
        """Time of a transfer over one link, chunk by chunk."""
        full, rest = (0, n_bytes) if self.chunk_bytes is None else divmod(n_bytes, self.chunk_bytes)
        ns = full * self.transfer_ns(link, self.chunk_bytes or 0) if full else 0
        return ns + (self.transfer_ns(link, rest) if rest or not full else 0)

    def activation_ns(self, link: Link, n_rows: int) -> int:
        """Time of the hidden states of ``n_rows`` rows over one link, ns."""
        key = (link.name, n_rows)
        if key not in self._activations:
            curve = link.activation or next(iter(link.curves.values()))
            self._activations[key] = self._over(curve, self.model.activation_bytes(n_rows), f"activation {link.name}")
        return self._activations[key]

    def _over(self, curve: Transfer, n_bytes: int, what: str) -> int:
        if not curve.points:
            self._ledger.note(what, "latency + bytes / rate", f"{curve.key}.latency_us", f"{curve.key}.bytes_per_s")
            return self._copied(curve, n_bytes)
        first, last = curve.points[0][0], curve.points[-1][0]
        inside = first <= n_bytes <= last
        if not inside and not self.extrapolate:
            raise HardwareError(
                f"{self.hardware.path}: {curve.key}: expected copies of {first}..{last} bytes, as measured, got {n_bytes}; "
                "measure it or set extrapolate: true"
            )
        self._ledger.note(what if inside else f"{what} outside its range",
                          "points" if inside else "points, extrapolated", f"{curve.key}.points")  # fmt: skip
        return self._copied(curve, n_bytes)

    def _copied(self, curve: Transfer, n_bytes: int) -> int:
        return within_a_day(copy_ns(curve, n_bytes), f"{self.hardware.path}: {curve.key} ({n_bytes} bytes)")


def most_chunks(model: ModelSpec, chunk_bytes: int | None) -> int:
    """Count the chunks of a transfer of the model's largest expert."""
    return 1 if chunk_bytes is None else ceil_div(_largest(model), max(1, chunk_bytes))


def check_chunk(model: ModelSpec, chunk_bytes: int, place: str) -> None:
    """Refuse chunks so small that a transfer would have more than `moesim.core.limits.CHUNKS`. Raises `HardwareError`."""
    least = ceil_div(_largest(model), CHUNKS)
    if chunk_bytes < least:
        raise HardwareError(
            f"{place}: expected at least {least} bytes, as an expert of {model.name} ({format_bytes(_largest(model))}) goes in "
            f"at most {CHUNKS} chunks, or nothing for one piece, got {chunk_bytes}"
        )


def _largest(model: ModelSpec) -> int:
    return max(model.expert_bytes_by_layer or (model.expert_bytes(0),))
