"""Which figures an experiment asks for: the entries of ``plots``, each the name of a kind or a mapping with its options."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from moesim.errors import ConfigError, mistyped, unknown_name
from moesim.metrics.naming import policy_label

if TYPE_CHECKING:
    from moesim.plots.style import Medium

KIND: Final = "kind"
_FRAMES: Final = ("steps", "layers")  # sources that need `frames: true`


class Asked(NamedTuple):
    """One entry of ``plots``."""

    name: str  # with which the names of its files begin: the kind, and a number from the second entry of a kind on
    kind: str
    options: Mapping[str, Any] = {}  # of the kind
    policies: Sequence[str] = ()  # in their order; empty: all
    where: Sequence[tuple[str, str]] = ()  # columns and the values that they must have
    medium: Medium = "screen"
    width: float | None = None  # in inches; None: as wide as the kind is by itself


def read_plots(plots: Sequence[Any], place: str, policies: Collection[str] = (), *, frames: bool = True) -> list[Asked]:
    """Read the entries of ``plots`` and check them before anything runs; one that is written twice counts once."""
    found: list[Asked] = []
    entries = [entry if isinstance(entry, dict) else {KIND: entry} for entry in plots]
    for i, entry in enumerate(entries):
        if entry in entries[:i]:
            continue
        here = f"{place}: plots[{i}]"
        kind = _kind(entry[KIND], here, frames=frames)
        number = 1 + sum(one.kind == kind for one in found)
        found.append(_read(entry, kind, kind if number == 1 else f"{kind}-{number}", here, policies))
    return found


def _kind(name: Any, here: str, *, frames: bool) -> str:
    from moesim.plots.catalogue import IN_EXPERIMENTS, KINDS, SOURCES  # Matplotlib takes most of a second to import

    known = [name for name, kind in KINDS.items() if kind.source in IN_EXPERIMENTS]
    if not isinstance(name, str):
        raise ConfigError(f"{here}: {KIND}: {mistyped('the name of a kind of figure', name)}")
    if name in KINDS and name not in known:
        needs = SOURCES[KINDS[name].source]
        raise ConfigError(f"{here}: expected a figure of runs, got '{name}'; `moesim plot {name}` draws {needs}")
    if name not in known:
        raise ConfigError(f"{here}: {unknown_name('plot', name, known)}")
    if KINDS[name].source in _FRAMES and not frames:
        raise ConfigError(f"{here}: expected frames for '{name}', got none; set `frames: true`")
    return name


def _read(entry: Mapping[str, Any], kind: str, name: str, here: str, known: Collection[str]) -> Asked:
    from moesim.plots.catalogue import KINDS
    from moesim.plots.options import read_options
    from moesim.plots.style import MEDIA
    from moesim.plots.widths import parse_width

    options = dict(entry)
    del options[KIND]
    policies = options.pop("policies", [])
    where, medium, width = options.pop("where", {}), options.pop("medium", "screen"), options.pop("width", None)
    if not isinstance(where, dict):
        raise ConfigError(f"{here}: where: {mistyped('a mapping of columns to values', where)}; write {{batch_size: 4}}")
    if where and KINDS[kind].source == "records":
        raise ConfigError(
            f"{here}: where: expected none for '{kind}', which shows the first setting; `moesim plot {kind} --where` draws others"
        )
    if medium not in MEDIA:
        raise ConfigError(f"{here}: medium: {unknown_name('medium', str(medium), MEDIA)}")
    policies = [_label(one) for one in (policies if isinstance(policies, list) else [policies])]
    if "baseline" in options:
        options["baseline"] = _label(options["baseline"])
    for key, names in (("policies", policies), ("baseline", [options["baseline"]] if "baseline" in options else [])):
        for one in names:
            if known and one not in known:
                raise ConfigError(f"{here}: {key}: {unknown_name('policy of this experiment', one, known)}")
    try:
        read = read_options(kind, {key: _typed(value) for key, value in options.items() if value is not None})
    except ConfigError as error:
        raise ConfigError(f"{here}: {error}") from None
    inches = None if width is None else parse_width(_typed(width), f"{here}: width")
    return Asked(name, kind, read, policies, [(str(key), _typed(value)) for key, value in where.items()], medium, inches)


def _label(policy: Any) -> str:
    """Name a policy as the results do: by its name, or by the mapping that the experiment has for it."""
    return policy_label(policy) if isinstance(policy, dict) and "name" in policy else _typed(policy)


def _typed(value: Any) -> str:
    """Write a value as it is typed on the command line."""
    if isinstance(value, list):
        return ",".join(map(_typed, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def needs_records(asked: Sequence[Asked]) -> bool:
    """Whether a figure is drawn from records, those of all policies at the first setting."""
    if not asked:
        return False
    from moesim.plots.catalogue import KINDS

    return any(KINDS[one.kind].source == "records" for one in asked)
