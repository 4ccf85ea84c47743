"""Options of policies and parts: declared once with type, bounds and meaning, for pydantic.

::

    class Keep(PolicyBase):
        share: float = option(0.5, "How much of the cache is never replaced.", ge=0, le=1)

The constructor, attributes, checks, messages and ``moesim list`` follow from that. A subclass has its bases' options, and may
declare one anew or fix it by an assignment; a shared type is ``Annotated[int, Field(ge=1, description="...")]``. A class with
a constructor of its own has that one's named parameters as options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, Final, dataclass_transform, get_args, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from pydantic.fields import FieldInfo

from moesim.core.own_code import is_ours
from moesim.errors import ConfigError, mistyped, unknown_name
from moesim.policy import Event

REQUIRED: Final = inspect.Parameter.empty
_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)
_WORDS = {
    "boolean": "true or false", "integer": "an integer", "number": "a number", "string": "a string", "null": "null",
    "object": "a mapping", "array": "a list",
}  # fmt: skip


def option(default: Any = ..., meaning: str = "", *, ge: float | None = None, le: float | None = None) -> Any:
    """Declare an option of a policy or part, as the value of an annotated attribute.

    Without ``default`` it is required; without ``meaning`` it has that of its type; both bounds are included.
    """
    said: dict[str, Any] = {"description": meaning or None, "ge": ge, "le": le}
    return Field(default, **{key: value for key, value in said.items() if value is not None})


class Option:
    """One option: its name, type with bounds, default and meaning."""

    def __init__(self, name: str, field: FieldInfo) -> None:
        self.name = name
        self.required = field.is_required()
        self.default: Any = REQUIRED if self.required else field.default
        self.meaning = field.description or ""
        self.type: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation

    def read(self, value: Any) -> Any:
        """Return a value as the option holds it; raise `ValueError` with what was expected."""
        try:
            found = self._adapter.validate_python(value)
        except ValidationError as error:
            see = "; see moesim list policy-parts" if "a part" in self.expected else ""
            raise ValueError(_own_words(error) or mistyped(self.expected, value) + see) from None
        return value if found == value else found

    def fits(self, value: Any) -> bool:
        try:
            self.read(value)
        except ValueError:
            return False
        return True

    @property
    def expected(self) -> str:
        """Its type and bounds, for people."""
        return describe(self.schema) or getattr(self.type, "__name__", str(self.type))

    @property
    def schema(self) -> dict[str, Any]:
        """Its type and bounds as JSON Schema; empty where that has no word for it."""
        try:
            return self._adapter.json_schema()
        except PydanticInvalidForJsonSchema:
            return {}

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        try:
            return TypeAdapter(self.type, config=_STRICT)
        except PydanticSchemaGenerationError:
            return TypeAdapter(Any)


def _own_words(error: ValidationError) -> str:
    """Return what a validator of a type said."""
    first = error.errors(include_url=False)[0]
    return str(first["ctx"]["error"]) if first["type"] == "value_error" else ""


def describe(schema: Mapping[str, Any]) -> str:
    """Write a JSON Schema for people.

    >>> describe({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}), describe({"enum": ["profile", "code"]})
    ('an integer of at least 1 or null', "'profile' or 'code'")
    """
    if "expected" in schema:
        return str(schema["expected"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(describe(one) for one in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " or ".join(map(repr, schema.get("enum") or [schema["const"]]))
    low, high = schema.get("minimum"), schema.get("maximum")
    word = _WORDS.get(schema.get("type", ""), "anything" if not schema else "")
    if low is not None and high is not None:
        return f"{word} from {low:g} to {high:g}"
    return word + (f" of at least {low:g}" if low is not None else f" of at most {high:g}" if high is not None else "")


@dataclass_transform(kw_only_default=True)
class Declared:
    """A class whose attributes with a value of `option` are its options."""

    _fields: ClassVar[Mapping[str, FieldInfo]] = {}
    _called: ClassVar[frozenset[str]] = frozenset()  # methods that it may have, and that no base has
    __signature__: ClassVar[inspect.Signature | None] = None

    def __init_subclass__(cls, *, fixed: bool = False, **rest: Any) -> None:
        """Note the options; ``fixed``: of those of the bases none can be set."""
        super().__init_subclass__(**rest)
        if not is_ours(cls.__module__):
            _check_class(cls)
        own = {name: value for name, value in vars(cls).items() if isinstance(value, FieldInfo)}
        inherited = {name: field for base in cls.__bases__ for name, field in getattr(base, "_fields", {}).items()}
        kept = {} if fixed else {name: field for name, field in inherited.items() if name in own or name not in vars(cls)}
        cls._fields = kept | own
        for name, field in own.items():
            if field.is_required():
                delattr(cls, name)
            else:
                setattr(cls, name, field.default)
        if cls.__init__ is Declared.__init__:
            one = inspect.Parameter
            defaults = {name: REQUIRED if field.is_required() else field.default for name, field in cls._fields.items()}
            cls.__signature__ = inspect.Signature(
                [one(name, one.KEYWORD_ONLY, default=value) for name, value in defaults.items()]
            )
        else:
            cls.__signature__ = None  # a constructor of its own; what a base has set would hide it

    def __init__(self, **options: Any) -> None:
        known = self._fields
        if wrong := [name for name in options if name not in known]:
            raise TypeError(f"{type(self).__name__} got an unexpected option '{wrong[0]}'")
        if lacking := [name for name, field in known.items() if field.is_required() and name not in options]:
            raise TypeError(f"{type(self).__name__} lacks the option '{lacking[0]}'")
        vars(self).update({name: options.get(name, field.default) for name, field in known.items()})

    def options(self) -> dict[str, Any]:
        """Return the options as they were given, by name."""
        return {name: getattr(self, name) for name in options_of(type(self))}


def _check_class(cls: type) -> None:
    """Refuse an option without a type, and a plain value or new default that the option of a base does not take."""
    inherited = _options_above(cls)
    for name, value in vars(cls).items():
        if isinstance(value, FieldInfo) and not any(name in inspect.get_annotations(base) for base in cls.__mro__):
            near = get_close_matches(name, inherited, 1)
            raise ConfigError(
                f"{cls.__name__}.{name}: expected an annotation such as `{name}: str = option(...)`, got none"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        above = inherited.get(name)
        plain = value
        if isinstance(value, FieldInfo):
            plain = value if value.is_required() or name in inspect.get_annotations(cls) else value.default
        if above is None or isinstance(plain, FieldInfo) or hasattr(type(plain), "__get__"):
            continue
        hint = get_type_hints(above, include_extras=True)[name]
        one = Option(name, FieldInfo.from_annotated_attribute(hint, above._fields[name]))
        if plain is None and "a part" in one.expected:
            continue  # none by name: `compose` builds it
        try:
            one.read(plain)
        except ValueError as error:
            raise ConfigError(f"{cls.__name__}.{name}: {error}") from None


def _options_above(cls: type) -> dict[str, type[Declared]]:
    """Return the options that bases have, each with the nearest class that has it."""
    return {name: base for base in reversed(cls.__mro__[1:]) if issubclass(base, Declared) for name in base._fields}


def misspelt(classes: Iterable[type]) -> str:
    """Return which method or option was probably meant by a name in a class that is not moesim's, or nothing."""
    for cls in classes:
        bases, options = cls.__mro__[1:], _options_above(cls)
        methods = {name for base in bases for name, value in vars(base).items() if inspect.isfunction(value)}
        methods |= cls._called if issubclass(cls, Declared) else set()
        known = {*methods, *options, *inspect.get_annotations(cls), *(name for base in bases for name in vars(base))}
        for name, value in vars(cls).items():
            is_method = inspect.isfunction(value)
            if is_ours(cls.__module__) or name in known or name.startswith("_") or (not is_method and hasattr(value, "__get__")):
                continue
            does = "calls" if is_method else "reads"
            if near := get_close_matches(name, methods if is_method else options, 1, 0.85):
                return f"{cls.__name__}.{name}: nothing {does} it; did you mean {near[0]}? a helper's name begins with _"
    return ""


def options_of(cls: type) -> Mapping[str, Option]:
    """Return the declared options of a policy or part, or its own constructor's parameters."""
    return _read_options(cls)


@cache
def _read_options(cls: Any) -> Mapping[str, Option]:
    if issubclass(cls, Declared) and cls.__init__ is Declared.__init__:
        hints = get_type_hints(cls, include_extras=True)
        found = {}
        for name, field in cls._fields.items():
            one = found[name] = Option(name, FieldInfo.from_annotated_attribute(hints[name], field))
            above = next((base for base in cls.__mro__[1:] if name in getattr(base, "_fields", ())), None)
            if not one.meaning and above is not None:
                one.meaning = options_of(above)[name].meaning
        return found
    if cls.__init__ is object.__init__:
        return {}
    hints = get_type_hints(cls.__init__, include_extras=True)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = {name: one for name, one in inspect.signature(cls).parameters.items() if one.kind in named}
    return {name: Option(name, _field_of(hints.get(name, Any), one.default)) for name, one in parameters.items()}


def _field_of(hint: Any, default: Any) -> FieldInfo:
    """Return a parameter of a constructor as a field."""
    return FieldInfo.from_annotation(hint) if default is REQUIRED else FieldInfo.from_annotated_attribute(hint, default)


def construct(
    cls: Any, options: Mapping[str, Any], what: str, place: str, hint: Callable[[str], str] = lambda option: ""
) -> Any:  # fmt: skip
    """Build a policy or part from a user's options; the other arguments are for messages."""
    known, values = options_of(cls), {}
    for name, value in options.items():
        if name not in known:
            wrong = unknown_name("option", str(name), known) if known else f"unknown option '{name}'; it has none"
            raise ConfigError("; ".join(filter(None, (f"{place}: {what}: {wrong}", hint(str(name))))))
        try:
            values[name] = known[name].read(value)
        except ValueError as error:
            raise ConfigError(f"{place}: {what}: option {name}: {error}") from None
    required = [one for one in known.values() if one.required and one.name not in options]
    if required:
        raise ConfigError(f"{place}: {what}: expected option {required[0].name} ({required[0].expected}), got none")
    return cls(**values)


# ------------------------------------------------------------------------------------------ what is declared apart from options
_NEEDS: Final = "'scores', 'scores-or-weights', 'oracle:routing', 'signal:<name>' or 'table:<name>'"


def wrong_declaration(policy: Any) -> str:
    """Return what is wrong with a policy's ``exact``, ``listens`` or ``needs``, or nothing."""
    return (
        _mistyped(policy, "exact", bool, "write True or False")
        or _mistyped(policy, "listens", frozenset, "write frozenset({Routed}), with the classes of its events")
        or _unknown_events(policy.listens)
        or wrong_needs(policy)
    )


def wrong_needs(made: Any) -> str:
    """Return what is wrong with the ``needs`` of a policy or part, or nothing."""
    if wrong := _mistyped(made, "needs", frozenset, "write frozenset(), or for example frozenset({'scores'})"):
        return wrong
    unknown = sorted((need for need in made.needs if not _can_be_needed(need)), key=repr)
    return f"needs {unknown[0]!r}; expected {_NEEDS}" if unknown else ""


def _mistyped(made: Any, name: str, kind: type, remedy: str) -> str:
    try:
        value = getattr(made, name)
    except AttributeError as error:  # there is none, or it is a property that asks for what is not there
        wrong = misspelt(type(made).__mro__)
        return wrong or f"expected the attribute {name} ({kind.__name__}), got: {error}; {remedy}"
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
