"""Options of policies and parts, each written once: an annotated attribute of the class, with its meaning below it.

::

    class Keep(PolicyBase):
        share: Annotated[float, Range(0, 1)] = 0.5
        \"\"\"How much of the cache is never replaced.\"\"\"

From there it appears in the constructor (``Keep(share=0.2)``), as an attribute, in the checks of what a user wrote, in
messages and in ``moesim list``. A class with a constructor of its own is read from that instead. `Declared.preset` names a
choice of options of a class, without another class body.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import (
    Any,
    ClassVar,
    NamedTuple,
    Self,
    TypeVar,
    cast,
    dataclass_transform,
    get_type_hints,
)

_T = TypeVar("_T")


def per_class(function: Callable[[type], _T]) -> Callable[[type], _T]:
    """Compute once what a function says of a class."""
    return cache(function)


class Range(NamedTuple):
    """Bounds of a numeric option, both included; used in ``Annotated`` and checked by the registry."""

    low: float | None = None
    high: float | None = None


class Lifted(NamedTuple):
    """What `option_of` returns: the option that this one is, and what this class says about it."""

    of: type
    name: str
    default: Any
    meaning: str = ""


class Written(NamedTuple):
    """What `option` returns."""

    hint: Any
    default: Any
    meaning: str


_THEIRS = object()


def option(hint: Any, default: Any, meaning: str = "") -> Any:
    """Declare an option of a preset.

    Parameters
    ----------
    hint : type
        Its type, perhaps ``Annotated`` with a `Range`.
    default : object
        Its default.
    meaning : str
        What it is; empty: what the class says.

    Returns
    -------
    object
        A value for a keyword of `Declared.preset`.
    """
    return Written(hint, default, meaning)


def option_of(cls: type, *, name: str = "", default: Any = _THEIRS, meaning: str = "") -> Any:
    """Declare an option that is an option of a part or of another policy, with its type, bounds, meaning and default.

    Parameters
    ----------
    cls : type
        The part or the other policy.
    name : str
        What the option is called there; empty: as here.
    default : object
        Another default; with None, null is allowed.
    meaning : str
        Another meaning, which may be written below the option as well.

    Returns
    -------
    object
        A value for an annotated attribute, or for a keyword of `Declared.preset`.
    """
    return Lifted(cls, name, default, meaning)


@dataclass_transform(kw_only_default=True)
class Declared:
    """A class whose annotated public attributes are its options; what is annotated with ``ClassVar`` is none.

    A subclass has the options of its bases. A plain assignment gives one another default, and ``fixed``, in the line that
    begins the class, names those that users cannot set any more.
    """

    _options: ClassVar[Mapping[str, inspect.Parameter]] = {}
    _lifted: ClassVar[Mapping[str, Lifted]] = {}
    _meanings: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, *, fixed: tuple[str, ...] = (), **rest: Any) -> None:
        super().__init_subclass__(**rest)
        own = dict.fromkeys(_own_names(cls))
        names = {name: None for base in cls.__bases__ for name in getattr(base, "_options", ())}
        names = {name: None for name in names if name not in fixed} | own
        cls._lifted = {name: one for name, one in cls._lifted.items() if name not in own} | _resolve(cls)
        one = inspect.Parameter
        cls._options = {name: one(name, one.KEYWORD_ONLY, default=getattr(cls, name, one.empty)) for name in names}
        if cls.__init__ is Declared.__init__:
            cls.__signature__ = inspect.Signature([*cls._options.values()])
        else:
            cls.__signature__ = None  # a constructor of its own; what a base has set would hide it

    @classmethod
    def preset(cls, name: str, text: str, *, fixed: tuple[str, ...] = (), **values: Any) -> type[Self]:
        """Give a choice of options a name: a class like this one with other defaults, constants and options.

        ``text`` is its docstring, and ``fixed`` names options that users cannot set. A value that is made by `option` or
        `option_of` is an option; any other is a default, or an attribute such as ``paper``.
        """
        hints = {
            key: one.hint if isinstance(one, Written) else Any for key, one in values.items() if isinstance(one, Written | Lifted)
        }
        plain = {key: one.default if isinstance(one, Written) else one for key, one in values.items()}
        meanings = {key: values[key].meaning for key in hints if values[key].meaning}
        module = sys._getframe(1).f_globals["__name__"]
        body = {"__doc__": text, "__module__": module, "__annotations__": hints, "_meanings": meanings}
        return cast("type[Self]", types.new_class(name, (cls,), {"fixed": fixed}, lambda space: space.update(body | plain)))

    __signature__: ClassVar[inspect.Signature | None] = None

    def __init__(self, **options: Any) -> None:
        given = inspect.Signature([*self._options.values()]).bind(**options)
        given.apply_defaults()
        for name, value in given.arguments.items():
            setattr(self, name, value)

    def options(self) -> dict[str, Any]:
        """Return the options as they were given, by name."""
        return {name: getattr(self, name) for name in option_parameters(type(self))}


def _own_names(cls: type) -> Iterator[str]:
    """Give the names of the options that a class adds to those of its bases, or declares anew."""
    for name, hint in inspect.get_annotations(cls).items():
        inherited = getattr(super(cls, cls), name, None)
        no_option = name.startswith("_") or "ClassVar" in str(hint) or isinstance(inherited, property)
        if not no_option and name not in _class_variables(cls):
            yield name


def _class_variables(cls: type) -> set[str]:
    return {name for base in cls.__mro__[1:] for name, hint in inspect.get_annotations(base).items() if "ClassVar" in str(hint)}


def _resolve(cls: type) -> dict[str, Lifted]:
    """Put the default of each option that is another class's into its place."""
    found = {}
    for name, value in list(vars(cls).items()):
        if isinstance(value, Lifted):
            one = found[name] = value._replace(name=value.name or name)
            setattr(cls, name, getattr(one.of, one.name) if one.default is _THEIRS else one.default)
    return found


def lifted_from(owner: Declared, cls: type) -> dict[str, Any]:
    """Return the options of a part's class that the policy has as its own, as they are set; without those that are None."""
    values = {one.name: getattr(owner, name) for name, one in owner._lifted.items() if one.of is cls}
    return {name: value for name, value in values.items() if value is not None}


def lifted_options(cls: type) -> Mapping[str, Lifted]:
    """Return the options of a class that are declared as another's."""
    return getattr(cls, "_lifted", {})


@per_class
def option_parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """Return the options of a policy or part, by name, with their defaults: the parameters of its constructor, if it has one."""
    if "__init__" not in {name for base in cls.__mro__[:-1] for name in vars(base)}:
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(cls).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in named}


@per_class
def option_hints(cls: type) -> Mapping[str, Any]:
    """Return the annotations of the options of a policy or part, by name; without those that have none."""
    parameters = option_parameters(cls)
    if not parameters:
        return {}
    hints = get_type_hints(cls if _is_declared(cls) else cls.__init__, include_extras=True)  # type: ignore[misc]
    hints |= {name: _lifted_hint(one) for name, one in lifted_options(cls).items()}
    return {name: hints[name] for name in parameters if name in hints}


def _lifted_hint(one: Lifted) -> Any:
    """Return the type and bounds of another class's option."""
    hint = option_hints(one.of)[one.name]
    return hint | None if one.default is None else hint


def _is_declared(cls: type) -> bool:
    return issubclass(cls, Declared) and cls.__init__ is Declared.__init__


@per_class
def option_meanings(cls: type) -> Mapping[str, str]:
    """Return the meanings of the options of a policy or part: the texts below them, or those of the bases or of `option_of`."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        lifted = {name: one for name, one in vars(base).get("_lifted", {}).items() if name in vars(base)}
        found |= {name: option_meanings(one.of)[one.name] for name, one in lifted.items()}
        found |= vars(base).get("_meanings", {}) | _texts(base)
    return {name: found.get(name, "") for name in option_parameters(cls)}


def _texts(cls: type) -> dict[str, str]:
    """Return the text below each annotated attribute of a class, from its source; nothing for a class without a file."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
    found = {}
    for above, below in pairwise(body):
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name) and isinstance(below, ast.Expr):
            text = below.value.value if isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                found[above.target.id] = " ".join(text.split())
    return found
