"""What a policy declares beside its methods: ``exact``, ``listens`` and ``needs``, each as the contract asks."""

from __future__ import annotations

from typing import Any, Final, get_args

from moesim.policy import Event

_NEEDS: Final = "'scores', 'scores-or-weights', 'oracle:routing', 'signal:<name>' or 'table:<name>'"


def wrong_declaration(policy: Any) -> str:
    """Say what is wrong with the ``exact``, ``listens`` or ``needs`` of a policy; nothing if they are as the contract asks."""
    return (
        _mistyped(policy, "exact", bool, "write True or False")
        or _mistyped(policy, "listens", frozenset, "write frozenset({Routed}), with the classes of its events")
        or _unknown_events(policy.listens)
        or wrong_needs(policy)
    )


def wrong_needs(made: Any) -> str:
    """Say what is wrong with the ``needs`` of a policy or part; nothing if there is nothing wrong."""
    if wrong := _mistyped(made, "needs", frozenset, "write frozenset(), or for example frozenset({'scores'})"):
        return wrong
    unknown = sorted((need for need in made.needs if not _can_be_needed(need)), key=repr)
    return f"needs {unknown[0]!r}; expected {_NEEDS}" if unknown else ""


def _mistyped(made: Any, name: str, kind: type, remedy: str) -> str:
    try:
        value = getattr(made, name)
    except AttributeError as error:  # there is none, or it is a property that asks for what is not there
        return f"expected the attribute {name} ({kind.__name__}), got: {error}; {remedy}"
    return "" if isinstance(value, kind) else f"expected {name} to be a {kind.__name__}, got {value!r}; {remedy}"


def _unknown_events(listens: frozenset[Any]) -> str:
    known = get_args(Event)
    unknown = sorted((one for one in listens if one not in known), key=repr)
    names = ", ".join(sorted(event.__name__ for event in known))
    return f"listens names no event: {unknown[0]!r}; expected classes of moesim.policy: {names}" if unknown else ""


def _can_be_needed(need: object) -> bool:
    if not isinstance(need, str):
        return False
    kind, _, rest = need.partition(":")
    return need in ("scores", "scores-or-weights", "oracle:routing") or (kind in ("signal", "table") and bool(rest))
