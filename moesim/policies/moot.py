"""Options that cannot matter beside others: declared with the option, refused where a user writes one.

A policy or part says so in the annotation of the option, as it gives a `Range`::

    w_size: Annotated[int, Range(1), OnlyWith(replacement=None), MootIf(u_size=0)] = 4

A part says so of the policy around it, too::

    w_size: Annotated[int, Range(1), MootIf(u_size=0), InPolicy(MootIf(placement=COLD))] = 4

The rule is about what happens in a run: a moot option leaves all its records as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from moesim.policies.declare import lifted_options, option_hints, option_parameters, per_class


class Where(NamedTuple):
    """A condition on the value of an option that no list of values says; of a part, on the part that was built.

    ``text`` is read after the option's name. ``holds`` takes the value, or the part that was built from it unless ``as_written``.
    """

    text: str
    holds: Callable[[Any], bool]
    as_written: bool = False


class MootIf:
    """Marks an option that cannot matter where all the others named have the given values.

    Each of ``others`` is a value, a tuple of values or a `Where`. The option itself may be among them, if only some values are moot.
    """

    def __init__(self, **others: Any) -> None:
        self.others = others

    def broken_by(self, owner: Any) -> Mapping[str, Any]:
        """Return the options of a policy or part that make the marked one moot; none if it may matter."""
        return self.others if all(_has(owner, name, wanted) for name, wanted in self.others.items()) else {}

    def __str__(self) -> str:
        return "not with " + " and ".join(f"{name} {_text(wanted)}" for name, wanted in self.others.items())


class OnlyWith(MootIf):
    """Marks an option that can only matter where all the others named have the given values; arguments as of `MootIf`."""

    def broken_by(self, owner: Any) -> Mapping[str, Any]:
        """Return the first of the options that has another value."""
        return next(({name: wanted} for name, wanted in self.others.items() if not _has(owner, name, wanted)), {})

    def __str__(self) -> str:
        return super().__str__().replace("not with", "only with", 1)


class InPolicy:
    """Marks an option of a part by a rule about the policy that has the part: its other parts and its options.

    In a policy that has not all that the rule names, the rule says nothing.

    ``own`` are other options of the part and what they must have for the rule to count.
    """

    def __init__(self, rule: MootIf, **own: Any) -> None:
        self.rule = rule
        self.own = own

    def __str__(self) -> str:
        own = "".join(f", with {name} {_text(wanted)}" for name, wanted in self.own.items())
        return f"in a policy{own}, {self.rule}"


Rule = MootIf | InPolicy


def moot_options(owner: Any, written: Iterable[str]) -> dict[str, str]:
    """Find the options of a policy or part that cannot matter beside its other options.

    Returns by option, of those ``written``, what makes it moot and what to do, as the rest of a message.
    """
    rules = rules_of(type(owner))
    whys = {option: _first(_why(rule, owner, option) for rule in rules.get(option, ())) for option in written}
    return {option: why for option, why in whys.items() if why}


def moot_in_parts(policy: Any, options: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Find the options of a policy's parts that cannot matter beside its other parts and options.

    Returns the same by part and option; ``options`` are those of the policy that a user wrote, of parts as mappings.
    """
    found = {}
    for name, spec in options.items():
        part = getattr(getattr(policy, "parts", None), name, None)
        if part is None or not isinstance(spec, Mapping):
            continue
        rules = rules_of(type(part))
        whys = {option: _first(_in_policy(rule, part, policy) for rule in rules.get(option, ())) for option in spec}
        found[name] = {option: why for option, why in whys.items() if why}
    return {name: moot for name, moot in found.items() if moot}


def _in_policy(rule: Rule, part: Any, policy: Any) -> str:
    """Say what of a policy makes an option of a part moot, by a rule that may speak about other policies."""
    if not isinstance(rule, InPolicy) or not all(hasattr(policy, name) for name in rule.rule.others):
        return ""
    holds = all(_has(part, name, wanted) for name, wanted in rule.own.items())
    return _why(rule.rule, policy, beside=[_now(part, name) for name in rule.own]) if holds else ""


def _why(rule: Rule, owner: Any, option: str = "", beside: Iterable[str] = ()) -> str:
    """Say why an option, which may be one of the owner's, is moot, by a rule about the owner; else nothing."""
    broken = rule.broken_by(owner) if isinstance(rule, MootIf) else {}
    if not broken:
        return ""
    others = " and ".join([*beside, *(_now(owner, name) for name in broken if name != option)])
    mine = option_parameters(type(owner))  # what a preset has fixed cannot be set
    or_set = [f"set {name}: {_text(wanted)}" for name, wanted in broken.items() if isinstance(rule, OnlyWith) and name in mine]
    return f"cannot matter beside {others}; {', or '.join(['leave it out', *or_set])}"


def _first(reasons: Iterable[str]) -> str:
    return next((why for why in reasons if why), "")


@per_class
def rules_of(cls: type) -> Mapping[str, tuple[Rule, ...]]:
    """Return the rules of the options of a policy or part, by option; without those that have none."""
    found = {name: (*_rules(hint), *_lifted_rules(cls, name)) for name, hint in option_hints(cls).items()}
    return {name: rules for name, rules in found.items() if rules}


def _lifted_rules(cls: type, option: str) -> Iterator[Rule]:
    """Give the rules of another class's option that are about options of this one, too, by their names here."""
    lifted, mine = lifted_options(cls), option_parameters(cls)
    if option not in lifted:
        return
    names = {one.name: name for name, one in lifted.items() if one.of is lifted[option].of}
    for rule in rules_of(lifted[option].of).get(lifted[option].name, ()):
        if isinstance(rule, InPolicy) and not rule.own and set(rule.rule.others) <= set(mine):
            yield rule.rule
        elif isinstance(rule, MootIf) and set(rule.others) <= set(names):
            yield type(rule)(**{names[name]: wanted for name, wanted in rule.others.items()})


def describe_rules(cls: type) -> dict[str, str]:
    """Write the rules of a policy's or part's options for people, by option."""
    return {name: "; ".join(map(str, rules)) for name, rules in rules_of(cls).items()}


def _rules(hint: Any) -> Iterator[Rule]:
    """Find the rules anywhere in an annotation: ``Annotated[int, ...] | None`` has them in a member of a union."""
    if get_origin(hint) is Annotated:
        yield from (extra for extra in get_args(hint)[1:] if isinstance(extra, Rule))
    for inside in get_args(hint):
        yield from _rules(inside)


def _has(owner: Any, name: str, wanted: Any) -> bool:
    value = getattr(owner, name)
    if isinstance(wanted, Where):
        return wanted.holds(value if wanted.as_written else getattr(getattr(owner, "parts", None), name, value))
    options = wanted if isinstance(wanted, tuple) else (wanted,)
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in options)


def _now(owner: Any, name: str) -> str:
    """Write the present value of an option, and whether it is the default."""
    value = getattr(owner, name)
    parameter = option_parameters(type(owner)).get(name)  # a policy may have fixed what is an option of another
    shown = value.get("name", value) if isinstance(value, Mapping) else value
    is_default = parameter is not None and type(value) is type(parameter.default) and value == parameter.default
    return f"{name}: {_text(shown)}" + (" (the default)" if is_default else "")


def _text(value: Any) -> str:
    if isinstance(value, Where):
        return value.text
    if isinstance(value, tuple):
        return " or ".join(map(_text, value))
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
