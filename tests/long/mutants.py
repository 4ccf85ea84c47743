"""Faults that can be planted in Python code: where, of which kind, and what stands there instead.

No fault is planted in what is only read: annotations, docstrings, texts of messages, assertions, ``strict`` of zip among these;
nor where it changes nothing, whatever the values: the order of the arguments of min and max, an axis that is the default.
"""

from __future__ import annotations

import ast
import random
import types
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Pow: ast.Mult,
}  # fmt: skip
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "list", "round": "int"}
_LAST_AXIS = {"sort", "argsort", "partition", "argpartition", "take_along_axis"}  # by default
_KEYWORDS = {"key", "default", "reverse", "start", "initial", "axis", "side", "kind"}
_STATEMENTS = ast.Expr | ast.AugAssign | ast.Delete | ast.Continue | ast.Break
_IGNORED = ast.JoinedStr | ast.Raise | ast.Assert | ast.Global | ast.Nonlocal | ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class Site:
    """A place in a file, in bytes from its beginning, and what would stand there."""

    kind: str
    start: int
    end: int
    new: str
    scope: str  # of its function, as Python names it; empty: run when the file is imported
    statement: str  # the line of the statement it is in, as Python writes it
    change: str
    whole: bool  # a statement, not an expression

    @property
    def key(self) -> tuple[str, str, str]:
        """What the fault is, wherever its file is and its line."""
        return self.scope, self.statement, self.change


@dataclass(frozen=True)
class Mutant:
    """A fault of one file; the number repeats it."""

    number: int
    file: Path
    site: Site

    def planted(self, data: bytes) -> bytes:
        """Return a file's content with the fault."""
        return data[: self.site.start] + self.site.new.encode() + data[self.site.end :]


class _Finder(ast.NodeVisitor):
    """Finds the sites of one file."""

    def __init__(self, data: bytes) -> None:
        self.found: list[Site] = []
        self._lines = [0]
        for line in data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._scope: list[str] = []
        self._in_function = 0
        self._statement: ast.stmt | None = None
        self._returns = ""
        self.visit(ast.parse(data))

    def span(self, node: Any) -> tuple[int, int]:
        """Return where a node begins and ends."""
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _add(self, kind: str, node: ast.expr | ast.stmt, new: str) -> None:
        if self._statement is None:
            return
        whole, old = isinstance(node, ast.stmt), ast.unparse(node)
        statement = ast.unparse(self._statement).splitlines()[0]
        scope = ".".join(self._scope) if self._in_function else ""
        new = new if whole else f"({new})"
        self.found.append(Site(kind, *self.span(node), new, scope, statement, f"{old} -> {new}", whole))

    def _changed(self, kind: str, node: Any, **fields: Any) -> None:
        """Add a node with other fields."""
        other = copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        self._add(kind, node, ast.unparse(other))

    def visit(self, node: ast.AST) -> None:
        """Find the faults of a node and of what is in it."""
        if isinstance(node, _IGNORED) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return
        before = self._statement
        if isinstance(node, ast.stmt):
            self._statement = node
        getattr(self, f"_of_{type(node).__name__.lower()}", lambda _: None)(node)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            self._enter(node)
        else:
            for name, value in ast.iter_fields(node):
                if name in ("annotation", "pattern", "format_spec"):
                    continue
                for one in value if isinstance(value, list) else [value]:
                    if isinstance(one, ast.AST) and not (isinstance(node, ast.Module) and _is_text(one)):
                        self.visit(one)
        self._statement = before

    def _enter(self, node: ast.FunctionDef | ast.ClassDef | ast.Lambda) -> None:
        """Visit a function or class: defaults in the scope around it, its body in its own."""
        if not isinstance(node, ast.ClassDef):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    self.visit(default)
        if isinstance(node, ast.Lambda):
            self.visit(node.body)
            return
        function, returns = isinstance(node, ast.FunctionDef), self._returns
        self._scope.append(node.name)
        self._in_function += function
        if isinstance(node, ast.FunctionDef):
            self._returns = "" if node.returns is None else ast.unparse(node.returns)
        for one in node.body:
            if not _is_text(one):
                self.visit(one)
        self._returns = returns
        self._in_function -= function
        self._scope.pop()

    # ---- faults by the type of a node
    def _of_compare(self, node: ast.Compare) -> None:
        for at, operator in enumerate(node.ops):
            self._changed("comparison", node, ops=[*node.ops[:at], _COMPARISONS[type(operator)](), *node.ops[at + 1 :]])

    def _of_binop(self, node: ast.BinOp) -> None:
        if type(node.op) in _OPERATORS and (self._in_function or not isinstance(node.op, ast.BitOr)):  # of types, outside
            self._changed("arithmetic", node, op=_OPERATORS[type(node.op)]())

    def _of_augassign(self, node: ast.AugAssign) -> None:
        if type(node.op) in _OPERATORS:
            self._changed("arithmetic", node, op=_OPERATORS[type(node.op)]())

    def _of_constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self._add("constant", node, str(node.value + 1))
        elif isinstance(node.value, float):
            self._add("constant", node, str(node.value * 2 or 1.0))

    def _of_boolop(self, node: ast.BoolOp) -> None:
        self._changed("and, or", node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())

    def _of_unaryop(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("condition", node, ast.unparse(node.operand))

    def _of_if(self, node: ast.If) -> None:
        self._add("condition", node.test, f"not ({ast.unparse(node.test)})")

    def _of_ifexp(self, node: ast.IfExp) -> None:
        self._add("condition", node.test, f"not ({ast.unparse(node.test)})")

    def _of_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._add("condition", test, "True")

    def _of_call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in _FUNCTIONS:
            keywords = [] if _FUNCTIONS[name] in ("list", "int") else node.keywords
            self._changed("function", node, func=ast.Name(_FUNCTIONS[name]), keywords=keywords)
        for at, keyword in enumerate(node.keywords):
            if keyword.arg in _KEYWORDS and name not in ("field", "dict") and not _is_last_axis(node.func, keyword):
                self._changed("keyword", node, keywords=[*node.keywords[:at], *node.keywords[at + 1 :]])
        args = [] if name in ("min", "max") else node.args
        for at, (one, other) in enumerate(pairwise(args)):
            if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred) and not _is_literal(one, other):
                self._changed("arguments", node, args=[*args[:at], other, one, *args[at + 2 :]])

    def _of_expr(self, node: ast.Expr) -> None:
        self._add("statement", node, "pass")

    _of_delete = _of_continue = _of_break = _of_expr

    def _of_assign(self, node: ast.Assign) -> None:
        if self._in_function and all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._add("statement", node, "pass")

    def _of_subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Slice) and isinstance(node.ctx, ast.Load):
            for name in ("lower", "upper"):
                if getattr(node.slice, name) is not None:
                    other = copy(node.slice)
                    setattr(other, name, None)
                    self._changed("slice", node, slice=other)

    def _of_return(self, node: ast.Return) -> None:
        if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None):
            return
        old, kind = ast.unparse(node.value), self._returns.partition("[")[0]
        if old in ("[]", "()") and kind in ("list", "Sequence", "Iterable", "tuple"):  # stays as it is without its last item
            return
        less = f"[*({old})][:-1]"
        other = {"int": f"({old}) + 1", "float": f"({old}) * 2", "bool": f"not ({old})", "tuple": f"({old})[::-1]",
                 "list": less, "Sequence": less, "Iterable": less}.get(kind, "None")  # fmt: skip
        self._add("return", node.value, other)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_last_axis(function: ast.expr, keyword: ast.keyword) -> bool:
    usual = isinstance(function, ast.Attribute) and function.attr in _LAST_AXIS
    return usual and keyword.arg == "axis" and ast.unparse(keyword.value) == "-1"


def _is_literal(*nodes: ast.expr) -> bool:
    return all(isinstance(node, ast.Constant) for node in nodes) or ast.unparse(nodes[0]) == ast.unparse(nodes[1])


def sites(data: bytes) -> list[Site]:
    """Find all faults that could be planted in a file."""
    return _Finder(data).found


def drawn(files: Mapping[Path, bytes], seed: int, n: int, only: Iterable[int] = ()) -> Iterator[Mutant]:
    """Draw different faults, each kind as often as any other; each depends on the seed, its number, and the files."""
    kinds: dict[str, list[tuple[Path, Site]]] = {}
    for file in sorted(files):
        for site in sites(files[file]):
            kinds.setdefault(site.kind, []).append((file, site))
    wanted, seen = set(only), set()
    for number in range(max(wanted) + 1 if wanted else n):
        rng = random.Random(f"{seed} {number}")
        while (choice := rng.choice(kinds[rng.choice(sorted(kinds))])) in seen:
            pass
        seen.add(choice)
        if not wanted or number in wanted:
            yield Mutant(number, *choice)


def probed(data: bytes, places: Mapping[int, Site]) -> bytes:
    """Return a file that notes when the place of a fault is reached, line for line as it was.

    What is run when the file is imported counts as reached by all that runs a function of the file.
    """
    finder, spans = _Finder(data), []
    for number, site in places.items():
        if site.scope:
            spans.append((site.start, site.end, site.whole, number))
    inside = [number for number, site in places.items() if not site.scope]
    for node in ast.walk(ast.parse(data)) if inside else ():
        if isinstance(node, ast.FunctionDef) and (first := _first(node.body)) is not None:
            spans += [(*finder.span(first), isinstance(first, ast.stmt), number) for number in inside]
    edits: list[tuple[int, int, int, str]] = []
    for start, end, whole, number in spans:
        if whole:
            edits.append((start, 1, -len(data), f"_reached({number}); "))
        else:
            edits += [(start, 1, start - end, f"(_reached({number}) or ("), (end, 0, -start, "))")]
    for at, _, _, text in sorted(edits, reverse=True):
        data = data[:at] + text.encode() + data[at:]
    return data


def _first(body: list[ast.stmt]) -> ast.stmt | ast.expr | None:
    """Return what a function evaluates first: a simple statement, or an expression of one that is not."""
    for node in body:
        if _is_text(node) or isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Global | ast.Nonlocal):
            continue
        if isinstance(node, ast.If | ast.While):
            return node.test
        if isinstance(node, ast.For):
            return node.iter
        if isinstance(node, ast.With):
            return node.items[0].context_expr
        if isinstance(node, ast.Match):
            return node.subject
        return _first(node.body) if isinstance(node, ast.Try) else node
    return None


def same_bytecode(a: bytes, b: bytes) -> bool:
    """Tell whether two files compile to the same, but for places."""
    return _code(compile(a, "", "exec")) == _code(compile(b, "", "exec"))


def _code(code: types.CodeType) -> tuple[Any, ...]:
    constants = tuple(_code(one) if isinstance(one, types.CodeType) else (type(one), one) for one in code.co_consts)
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_flags, code.co_exceptiontable
