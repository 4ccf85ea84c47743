"""Hardware profiles: what a machine is and what things cost on it, every number with its source.

A profile is one YAML file (format: `moesim.hardware_schema`, guide: ``hardware_profiles/README.md``). `load_hardware`
reads it, checks that it makes sense as a machine, and gives plain frozen dataclasses.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from moesim.errors import HardwareError, unknown_name
from moesim.hardware_schema import (
    Curve,
    ProfileFile,
    Sourced,
    is_number,
    read_yaml,
    type_at,
    unknown_key,
    validate,
)

LABELS = (
    "measured",
    "published",
    "derived",
    "spec-sheet",
    "extrapolated",
    "synthetic",
    "assumed",
    "oracle",
)  # fmt: skip
"""Source labels, strongest first. The first four and ``assumed`` occur in profiles, the others in results."""

TRANSFERS = ("pinned", "pageable", "chunked")
"""Kinds of transfer of weights over a link."""

_PPM = 1_000_000


def weakest(labels: Iterable[str]) -> str:
    """Find the weakest of some source labels.

    Parameters
    ----------
    labels : iterable of str
        Members of `LABELS`.

    Returns
    -------
    str
        The weakest; ``"measured"`` if there is none.

    Examples
    --------
    >>> weakest(["published", "spec-sheet", "measured"])
    'spec-sheet'
    """
    return max(labels, key=LABELS.index, default=LABELS[0])


@dataclass(frozen=True)
class Number:
    """A number of a profile as it was written, with its source label and the words that back it."""

    value: Any
    source: str
    ref: str


@dataclass(frozen=True)
class CostCurve:
    """Time as a function of rows.

    Attributes
    ----------
    key : str
        Where in the profile it is, for messages and provenance.
    form : str
        ``"linear"``: base + slope rows; ``"flat_linear"``: base up to ``knee`` rows, then slope for each row beyond;
        ``"points"``: straight lines between ``points``.
    first, last : int
        Rows for which it holds.
    base_us, slope_us : Fraction
        Microseconds, and microseconds a row.
    knee : int
        Rows up to which ``flat_linear`` is flat.
    points : tuple of (int, Fraction)
        Rows, microseconds.
    shape : tuple of (int, int, float) or None
        Hidden width, expert width, bits of an expert curve.
    model, part : str
        What a curve of a dense part is of.
    first_extra_us : Fraction or None
        Extra of the first expert of a group.
    """

    key: str
    form: str
    first: int
    last: int
    base_us: Fraction = Fraction(0)
    slope_us: Fraction = Fraction(0)
    knee: int = 0
    points: tuple[tuple[int, Fraction], ...] = ()
    shape: tuple[int, int, float] | None = None
    model: str = ""
    part: str = ""
    first_extra_us: Fraction | None = None


@dataclass(frozen=True)
class Device:
    """One device; see ``hardware_profiles/README.md`` for the meaning of each key.

    Attributes
    ----------
    name, kind, host : str
        Name, ``"gpu"`` or ``"cpu"``, and the machine it sits in.
    memory_bytes, workspace_bytes : int, bytes
        Capacity, and what the software needs of it apart from weights, KV cache and pools.
    memory_bytes_per_s, flops : int
        Rates that kernels reach, for rooflines.
    launch_us : Fraction, us
        Start-up of one kernel or operator.
    launches : mapping of str to int
        Kernels of each part (1 where not given).
    router_us : Fraction, us
        Time for the router's result to reach the host, once a layer.
    first_extra_us : Fraction or None, us
        Extra of the first expert of a group, unless the expert curve has its own.
    experts, parts : tuple of CostCurve
        Curves of experts, and of other parts of a layer.
    predict : mapping of str to CostCurve
        Curves of predictors by source name.
    idle_w, busy_w : float or None, W
        Power.
    side_ppm : int or None
        Rate of the side lane while the main lane is busy, parts per million.
    """

    name: str
    kind: str
    host: str
    memory_bytes: int
    workspace_bytes: int
    memory_bytes_per_s: int
    flops: int
    launch_us: Fraction
    launches: Mapping[str, int]
    router_us: Fraction
    first_extra_us: Fraction | None
    experts: tuple[CostCurve, ...]
    parts: tuple[CostCurve, ...]
    predict: Mapping[str, CostCurve]
    idle_w: float | None
    busy_w: float | None
    side_ppm: int | None


@dataclass(frozen=True)
class Transfer:
    """Time of a copy: latency + bytes / rate; ``key`` says where in the profile it is."""

    key: str
    latency_us: Fraction
    bytes_per_s: int


@dataclass(frozen=True)
class Link:
    """A directed link between two devices; links with the same ``medium`` are serial together."""

    name: str
    src: str
    dst: str
    medium: str | None
    curves: Mapping[str, Transfer]
    activation: Transfer | None
    share_link: bool


@dataclass(frozen=True)
class Pair:
    """Two activities, and the rate of each while both run, in parts per million of its rate alone.

    Activities are ``"<device>.experts"``, ``"<device>.dense"``, ``"<device>.side"``, and names of links.
    """

    a: str
    b: str
    a_rate_ppm: int
    b_rate_ppm: int
    source: str


@dataclass(frozen=True)
class HardwareProfile:
    """A machine.

    Attributes
    ----------
    name, path : str
        Name, and the file it came from.
    description : str
        One paragraph.
    corrections : tuple of str
        Where the profile differs from what was printed about the machine.
    compute : str
        Default device of everything that is not a routed expert.
    backing : tuple of str
        CPU devices that hold all experts.
    devices : mapping of str to Device
        In the order of the file.
    links : tuple of Link
        In the order of the file.
    contention : tuple of Pair
        What slows down what.
    platform_w : float or None, W
        Power of the rest of the machine.
    numbers : mapping of str to Number
        Every number of the file by its dotted key, with its source.
    overrides : tuple of str
        Dotted keys that an experiment has changed.
    """

    name: str
    path: str
    description: str
    corrections: tuple[str, ...]
    compute: str
    backing: tuple[str, ...]
    devices: Mapping[str, Device]
    links: tuple[Link, ...]
    contention: tuple[Pair, ...]
    platform_w: float | None
    numbers: Mapping[str, Number]
    overrides: tuple[str, ...] = field(default=())

    @property
    def labels(self) -> tuple[str, ...]:
        """Distinct source labels of all numbers, strongest first."""
        return tuple(sorted({number.source for number in self.numbers.values()}, key=LABELS.index))

    def link(self, name: str) -> Link:
        """Find a link by name, such as ``"cpu0->gpu0"``. Raises `HardwareError` if there is none."""
        for link in self.links:
            if link.name == name:
                return link
        raise HardwareError(f"{self.path}: {unknown_name('link', name, [link.name for link in self.links])}")

    def path_between(self, src: str, dst: str) -> tuple[Link, ...]:
        """Find the links from one device to another: fewest hops, then by name.

        Parameters
        ----------
        src, dst : str
            Names of devices.

        Returns
        -------
        tuple of Link
            Empty if they are the same.

        Raises
        ------
        HardwareError
            If a device is unknown or there is no way.
        """
        for device in (src, dst):
            if device not in self.devices:
                raise HardwareError(f"{self.path}: {unknown_name('device', device, self.devices)}")
        ways: list[tuple[str, tuple[Link, ...]]] = [(src, ())]
        seen = {src}
        while ways:
            for here, way in ways:
                if here == dst:
                    return way
            longer: list[tuple[str, tuple[Link, ...]]] = []
            for here, way in ways:
                for link in sorted(self.links, key=lambda link: link.name):
                    if link.src == here and link.dst not in seen:
                        longer.append((link.dst, (*way, link)))
            longer.sort(key=lambda item: [link.name for link in item[1]])
            ways = []
            for here, way in longer:
                if here not in seen:  # the first by name wins
                    seen.add(here)
                    ways.append((here, way))
        raise HardwareError(f"{self.path}: links: expected a path {src} -> {dst}, got none; add a link")


# ------------------------------------------------------------------------------------------------------------ loading


def load_hardware(source: str | Path | Mapping[str, Any], place: str = "hardware") -> HardwareProfile:
    """Load a profile.

    Parameters
    ----------
    source : str, Path or mapping
        A name among the shipped and local profiles; the path of a YAML file; or a mapping ``{base: NAME, ...}`` with
        overrides under dotted keys such as ``"devices.gpu0.memory_bytes"`` (or nested mappings). A mapping without
        ``base`` is a whole profile.
    place : str
        File and key of the source, for messages.

    Returns
    -------
    HardwareProfile

    Raises
    ------
    HardwareError
        If there is no such profile, or anything in it is wrong: one line with file, key, expected, got, remedy.

    Notes
    -----
    A number changed by an override carries the label ``assumed``, unless the override gives a whole
    ``{value: ..., source: ..., ...}``.
    """
    overrides: dict[str, Any] = {}
    if isinstance(source, Mapping):
        if "base" not in source:
            return build_profile(dict(source), place)
        if not isinstance(source["base"], (str, Path)):
            raise HardwareError(f"{place}.base: expected the name or path of a profile, got {source['base']!r}")
        overrides = dict(_flatten({key: value for key, value in source.items() if key != "base"}))
        source = source["base"]
    path = _find(source, place)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareError(f"{path}: cannot be read: {error}") from None
    raw = read_yaml(text, str(path))
    raw.setdefault("name", path.stem)
    if overrides:
        validate(raw, str(path))
        for key, value in overrides.items():
            _override(raw, key, value, place)
        return build_profile(raw, place, path=str(path), overrides=tuple(overrides))
    return build_profile(raw, str(path), path=str(path))


def _find(source: str | Path, place: str) -> Path:
    from moesim import data  # noqa: PLC0415  (keeps this module usable with explicit paths alone)

    text = str(source)
    if isinstance(source, Path) or text.endswith((".yaml", ".yml")) or "/" in text:
        path = Path(source)
        if not path.is_file():
            raise HardwareError(f"{place}: expected a hardware profile, got no file at {path}")
        return path
    known: dict[str, Path] = {}
    for folder in data.data_dirs("hardware_profiles"):
        for path in sorted(Path(folder).glob("*.yaml")):
            known.setdefault(path.stem, path)
    if text not in known:
        raise HardwareError(f"{place}: {unknown_name('hardware profile', text, known)}")
    return known[text]


def hardware_names() -> list[str]:
    """List the names of all profiles that can be found, sorted."""
    from moesim import data  # noqa: PLC0415

    return sorted({p.stem for d in data.data_dirs("hardware_profiles") for p in Path(d).glob("*.yaml")})


# ---------------------------------------------------------------------------------------------------------- overrides


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and "value" not in value:
            yield from _flatten(value, f"{dotted}.")
        else:
            yield dotted, value


def _override(raw: dict[str, Any], key: str, value: Any, place: str) -> None:
    steps: list[str | int] = [int(step) if step.isdecimal() else step for step in key.split(".")]
    for end in range(1, len(steps) + 1):
        if type_at(steps[:end]) is None:
            raise HardwareError(f"{place}: {key}: {unknown_key(steps[:end])}")
    number = is_number(steps)
    if number and not isinstance(value, Mapping):
        value = {"value": value, "source": "assumed", "why": f"set in {place}"}
    here: Any = raw
    for position, step in enumerate(steps[:-1]):
        inside = here[step] if (step in here if isinstance(here, dict) else _has(here, step)) else None
        if inside is None:
            if not isinstance(here, dict) or position == 1:  # a new device or link is not an override
                known = list(here) if isinstance(here, dict) else [str(i) for i in range(len(here))]
                message = unknown_name(str(steps[position - 1]).rstrip("s"), str(step), known)
                raise HardwareError(f"{place}: {key}: {message}")
            inside = here[step] = {}
        else:
            inside = here[step] = copy.copy(inside)  # YAML anchors share parts
        here = inside
    last = steps[-1]
    if isinstance(here, list) and not _has(here, last):
        raise HardwareError(f"{place}: {key}: expected an index below {len(here)}, got {last}")
    here[last] = value


def _has(values: list[Any], step: str | int) -> bool:
    return isinstance(step, int) and step < len(values)


# ----------------------------------------------------------------------------------------------------------- building


def build_profile(
    raw: Mapping[str, Any], place: str, *, path: str | None = None, overrides: tuple[str, ...] = ()
) -> HardwareProfile:
    """Build a profile from what the YAML holds; ``place`` is the file or key for messages. Raises `HardwareError`."""
    checked = validate(raw, place)
    links = tuple(_link(name, checked, place) for name in checked.links)
    profile = HardwareProfile(
        name=checked.name,
        path=path or place,
        description=" ".join(checked.description.split()),
        corrections=tuple(" ".join(note.split()) for note in checked.corrections),
        compute=checked.compute,
        backing=tuple(checked.backing),
        devices={name: _device(name, checked) for name in checked.devices},
        links=links,
        contention=tuple(_pair(index, checked) for index in range(len(checked.contention))),
        platform_w=checked.platform_w.value if checked.platform_w else None,
        numbers=dict(_numbers(checked, "")),
        overrides=overrides,
    )
    _check_machine(profile, place)
    return profile


def _exact(number: Any) -> Fraction:
    """Take a number of the file at its decimal value, so that results do not depend on binary rounding."""
    return Fraction(0) if number is None else Fraction(repr(number.value))


def _numbers(value: Any, key: str) -> Iterator[tuple[str, Number]]:
    if isinstance(value, Sourced):
        yield key, Number(value.value, value.source, value.proof())  # type: ignore[attr-defined]
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, f"{key}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{key}.{index}")
    elif hasattr(type(value), "model_fields"):
        for name in type(value).model_fields:
            if name != "anchors":
                yield from _numbers(getattr(value, name), f"{key}.{name}" if key else name)


def _curve(curve: Curve, key: str) -> CostCurve:
    shape = getattr(curve, "shape", None)
    extra = getattr(curve, "first_extra_us", None)
    flat = curve.form == "flat_linear"
    return CostCurve(
        key=key,
        form=curve.form,
        first=curve.range[0],
        last=curve.range[1],
        base_us=_exact(curve.flat_us if flat else curve.base_us),
        slope_us=_exact(curve.per_token_us),
        knee=curve.knee_tokens.value if curve.knee_tokens else 0,
        points=tuple((int(n), Fraction(repr(us))) for n, us in curve.points.value) if curve.points else (),
        shape=(shape.hidden, shape.intermediate, float(shape.bits)) if shape else None,
        model=getattr(curve, "model", ""),
        part=getattr(curve, "part", ""),
        first_extra_us=_exact(extra) if extra else None,
    )


def _device(name: str, profile: ProfileFile) -> Device:
    given = profile.devices[name]
    key = f"devices.{name}"
    return Device(
        name=name,
        kind=given.kind,
        host=given.host,
        memory_bytes=given.memory_bytes.value,
        workspace_bytes=given.workspace_bytes.value if given.workspace_bytes else 0,
        memory_bytes_per_s=round(given.memory_bytes_per_s.value),
        flops=round(given.flops.value),
        launch_us=_exact(given.launch_us),
        launches={part: count.value for part, count in given.launches.items()},
        router_us=_exact(given.router_us),
        first_extra_us=_exact(given.first_extra_us) if given.first_extra_us else None,
        experts=tuple(_curve(curve, f"{key}.experts.{i}") for i, curve in enumerate(given.experts)),
        parts=tuple(_curve(curve, f"{key}.parts.{i}") for i, curve in enumerate(given.parts)),
        predict={source: _curve(curve, f"{key}.predict.{source}") for source, curve in given.predict.items()},
        idle_w=given.idle_w.value if given.idle_w else None,
        busy_w=given.busy_w.value if given.busy_w else None,
        side_ppm=round(given.side_rate.value * _PPM) if given.side_rate else None,
    )


def _link(name: str, profile: ProfileFile, place: str) -> Link:
    given = profile.links[name]
    ends = name.split("->")
    if len(ends) != 2 or not all(ends):
        raise HardwareError(f"{place}: links.{name}: expected a name such as 'cpu0->gpu0', got '{name}'")
    curves = {}
    for kind in TRANSFERS:
        which = kind if getattr(given, kind) else "any"
        curve = getattr(given, which)
        if curve:
            key = f"links.{name}.{which}"
            curves[kind] = Transfer(key, _exact(curve.latency_us), round(curve.bytes_per_s.value))
    activation = given.activation and Transfer(
        f"links.{name}.activation", _exact(given.activation.latency_us), round(given.activation.bytes_per_s.value)
    )
    share = given.activation.share_link if given.activation else False
    return Link(name, ends[0], ends[1], given.medium, curves, activation, share)


def _pair(index: int, profile: ProfileFile) -> Pair:
    given = profile.contention[index]
    source = weakest((given.a_rate.source, given.b_rate.source))
    return Pair(given.a, given.b, round(given.a_rate.value * _PPM), round(given.b_rate.value * _PPM), source)


def _check_machine(profile: HardwareProfile, place: str) -> None:
    """Refuse what is well-formed but no machine."""

    def known_device(key: str, name: str) -> None:
        if name not in profile.devices:
            raise HardwareError(f"{place}: {key}: {unknown_name('device', name, profile.devices)}")

    known_device("compute", profile.compute)
    for link in profile.links:
        for end in (link.src, link.dst):
            known_device(f"links.{link.name}", end)
        if link.src == link.dst:
            raise HardwareError(f"{place}: links.{link.name}: expected two devices, got the same twice")
    for name in profile.backing:
        known_device("backing", name)
        if profile.devices[name].kind != "cpu":
            raise HardwareError(f"{place}: backing: expected a device of kind cpu, got '{name}' of kind gpu")
        try:
            profile.path_between(name, profile.compute)
            profile.path_between(profile.compute, name)
        except HardwareError as error:
            raise HardwareError(str(error).replace(f"{profile.path}:", f"{place}:", 1)) from None
    activities = [f"{name}.{what}" for name in profile.devices for what in ("experts", "dense", "side")]
    activities += [link.name for link in profile.links]
    for index, pair in enumerate(profile.contention):
        for end in (pair.a, pair.b):
            if end not in activities:
                raise HardwareError(f"{place}: contention.{index}: {unknown_name('activity', end, activities)}")
        if pair.a == pair.b:
            raise HardwareError(f"{place}: contention.{index}: expected two activities, got '{pair.a}' twice")
