"""Names to policies, options, and the messages for wrong ones."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moesim.cli.main import main
from moesim.errors import ConfigError
from moesim.policies.composed import Composed
from moesim.policies.options import option
from moesim.policies.parts.assignment import Greedy
from moesim.policies.registry import (
    GROUP,
    POLICIES,
    _exact_by_default,
    code_names,
    make_policy,
    part_targets,
    policy_class,
    policy_info,
    policy_names,
)
from moesim.policies.systems.fiddler import Fiddler
from moesim.policies.user_code import sources_digest

PLUGIN = '''
from moesim.policy import Placement, Routed, Run


class Elsewhere:
    """Runs on the host."""

    exact = True
    listens = frozenset({Routed})
    needs = frozenset()

    def __init__(self, device: str = "cpu0", *, spare: int = 1) -> None:
        self.device = device
        self.spare = spare

    def place(self, view):
        return Placement()

    def decide(self, event, view):
        return (Run(event.layer, event.active, self.device),)

    def evict(self, fetch, view):
        return None


number = 3
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of a third party, installed with an entry point."""
    (tmp_path / "elsewhere_plugin.py").write_text(PLUGIN)
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nelsewhere = elsewhere_plugin:Elsewhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("elsewhere_plugin", None)


def test_a_name_makes_a_new_policy_each_time() -> None:
    first, second = make_policy("fiddler"), make_policy("fiddler")
    assert isinstance(first, Fiddler)
    assert first is not second


def test_a_mapping_passes_options() -> None:
    policy = make_policy({"name": "fiddler", "rule": "code"})
    assert isinstance(policy, Fiddler)
    assert policy.options() == {"rule": "code", "serial": False, "released": None, "pageable": False}
    assert repr(policy) == "Fiddler(rule='code')"


def test_a_class_of_a_third_party_is_named_by_its_path(plugin: None) -> None:
    policy: Any = make_policy({"name": "elsewhere_plugin:Elsewhere", "device": "cpu1"})
    assert policy.device == "cpu1"


def test_an_entry_point_is_a_name(plugin: None) -> None:
    assert policy_names() == sorted([*POLICIES, "elsewhere"])
    policy: Any = make_policy({"name": "elsewhere", "spare": 2})
    assert policy.spare == 2
    info = next(one for one in policy_info() if one.name == "elsewhere")
    assert (info.summary, info.options) == ("Runs on the host.", {"device": "cpu0", "spare": 1})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"assignment": Greedy(), "width": 3}, "it is an option of assignment beam: write assignment: {name: beam, width: 3}"),
        ({"assignment": {"name": "beam"}, "width": {4}}, 'write assignment: {name: beam, width: "{4}"}'),
        ({"assignment": "greedy", "width": None}, "write assignment: {name: beam, width: null}"),
    ],
)
def test_an_option_of_a_part_is_named_whatever_stands_beside_it(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_policy({"name": "composed", **options})
    assert says in str(error.value)


def test_a_class_is_exact_unless_it_says_otherwise() -> None:
    class Plain:
        exact: Any = True

    class Not(Plain):
        exact = False

    class Asked(Plain):
        exact = property(lambda self: self.nowhere)  # of an object that there is not yet

    class ByOption(Composed):
        keep: int = option(1)
        exact = property(lambda self: self.keep == 2)  # type: ignore[assignment]

    assert [_exact_by_default(cls) for cls in (object, Plain, Not, Asked, ByOption)] == [True, True, False, True, False]


def test_parts_that_are_classes_are_found_by_their_option_or_in_a_mapping() -> None:
    policy: dict[str, Any] = {
        "name": "a:Policy", "assignment": "b:Part", "scheduler": {"name": "c:Part", "placement": "d:Part"}, "mine": "e:Text",
        "own": {"name": "f:Part"}, "prefetch": "predicted", "replacement": {"name": "lru"}, "placement": None, "n": 1,
    }  # fmt: skip
    assert part_targets(policy) == ["b:Part", "c:Part", "f:Part"]
    assert code_names(policy) == ("a:Policy", "b:Part", "c:Part", "f:Part") and code_names("lru") == ("lru",)


@pytest.mark.parametrize(
    ("widths", "shown"),
    [([1, 2], "1}, {..., width: 2}"), ([1, 2, 3], "1}, {..., width: 2}, {..., width: 3}"),
     ([1, 2, 3, 4], "1}, {..., width: 2}, {..., width: 3}, ..."), ([1, 0], None), ([], None)],
)  # fmt: skip
def test_an_option_of_a_part_is_swept_by_listing_the_part(widths: list[int], shown: str | None) -> None:
    with pytest.raises(ConfigError) as error:
        make_policy({"name": "composed", "assignment": {"name": "beam", "width": widths}})
    remedy = f"; to sweep it, list the part: [{{..., width: {shown}]"
    assert str(error.value).endswith(remedy) if shown else "to sweep" not in str(error.value)


def test_a_composition_is_written_in_yaml() -> None:
    spec = {"name": "composed", "assignment": {"name": "beam", "width": 4}, "replacement": "static"}
    policy = make_policy(spec)
    assert isinstance(policy, Composed)
    assert repr(policy.parts.assignment) == "Beam(width=4)"
    assert policy.needs == frozenset()


WRONG = [
    ("fidler", "a.yaml: unknown policy 'fidler'; did you mean 'fiddler'? `moesim list policies` has all"),
    ("zzz", "a.yaml: unknown policy 'zzz'; `moesim list policies` has all"),
    (7, "a.yaml: expected a policy name or a mapping with the key name, got 7"),
    ({"rule": "code"}, "a.yaml: expected a policy name or a mapping with the key name, got {'rule': 'code'}"),
    (
        {"name": "fiddler", "rul": "code"},
        "a.yaml: policy fiddler: unknown option 'rul'; did you mean 'rule'? known: pageable, released, rule, ",
    ),
    (
        {"name": "fiddler", "rule": "guess"},
        "a.yaml: policy fiddler: option rule: expected 'profile' or 'code', got 'guess'; choose one of these",
    ),
    (
        {"name": "random", "seed": "1"},
        "a.yaml: policy random: option seed: expected an integer, got '1'; write it without quotes",
    ),
    (
        {"name": "composed", "replacement": 5},
        "a.yaml: policy composed: option replacement: expected a part by name or by a mapping, got 5; see moesim list "
        "policy-parts",
    ),
    (
        {"name": "fiddler", "serial": 1},
        "a.yaml: policy fiddler: option serial: expected true or false, got 1; choose one of these",
    ),
    (
        {"name": "mixtral-offloading", "buffer_size": 1},
        "a.yaml: policy mixtral-offloading: option buffer_size: expected an integer of at least 2, got 1; choose a value in",
    ),
    (
        {"name": "dali", "w_size": 2.5},
        "a.yaml: policy dali: option w_size: expected an integer of at least 1, got 2.5",
    ),
    ({"name": "all-cpu", "x": 1}, "a.yaml: policy all-cpu: unknown option 'x'; it has none"),
    (
        {"name": "composed", "replacement": "lur"},
        "a.yaml: policy composed: replacement: unknown replacement 'lur'; did you mean 'lru'? known:",
    ),
    (
        {"name": "composed", "replacement": "greedy"},
        "a.yaml: policy composed: replacement: 'greedy' is a part for assignment; unknown replacement 'greedy'; known:",
    ),
    (
        {"name": "composed", "assignment": "moesim.policies.parts.replacement:LRU"},
        "a.yaml: policy composed: assignment moesim.policies.parts.replacement:LRU: expected a class with start, assign",
    ),
    (
        {"name": "composed", "assignment": {"name": "beam", "widht": 2}},
        "a.yaml: policy composed: assignment: assignment beam: unknown option 'widht'; did you mean 'width'?",
    ),
    (
        {"name": "composed", "prefetch": {"name": "predicted"}},
        "a.yaml: policy composed: prefetch: prefetch predicted: expected option source (a string), got none",
    ),
    (
        {"name": "composed", "prefetch": {"size": 2}},
        "a.yaml: policy composed: prefetch: expected a mapping with the key name, got the keys ['size']",
    ),
    ({"name": "lru", "placement": 5}, "a.yaml: policy lru: option placement: expected a part by name or by a mapping, got 5"),
    ("no_such_module:Thing", "a.yaml: cannot import module 'no_such_module' of 'no_such_module:Thing'"),
    (
        "no_such.module:Thing",
        "a.yaml: cannot import module 'no_such.module' of 'no_such.module:Thing': No module named 'no_such', nei",
    ),
    (
        "moesim.policies.systems.fiddler:Fidler",
        "a.yaml: expected a class 'Fidler' in module 'moesim.policies.systems.fiddler', got none",
    ),
    ("moesim.errors:unknown_name", "a.yaml: expected a class 'unknown_name' in module 'moesim.errors', got <function"),
    ("moesim.errors:ConfigError", "a.yaml: policy moesim.errors:ConfigError: expected a class with place, decide and evict"),
]


@pytest.mark.parametrize(("spec", "message"), WRONG, ids=[str(spec) for spec, _ in WRONG])
def test_a_wrong_policy_is_one_line_that_says_what_to_do(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(message)) as caught:
        make_policy(spec, "a.yaml")
    assert "\n" not in str(caught.value)


def test_a_part_that_lacks_a_method_may_have_it_misspelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from moesim.policies.parts.replacement import Admitting\nclass Own(Admitting):\n    def victm(self): pass\n"
    (tmp_path / "misspelt_part.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"got no victim in Own; Own.victm: nothing calls it; did you mean victim\?"):
        make_policy({"name": "composed", "replacement": "misspelt_part:Own"})


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_what_is_missing_is_written_once(name: str) -> None:
    cls = policy_class(name)
    words = " ".join((cls.__doc__ or "").split())
    assert [item for item in getattr(cls, "missing", ()) if item in words] == []


TABLE_HEADS = ("| point | paper says | released code does | we do |", "| decision | code | ours |")  # the latter without a paper


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_is_described(name: str) -> None:
    info = next(one for one in policy_info([name]))
    assert info.summary.endswith(".")
    assert len(info.summary) < 120
    assert info.target == POLICIES[name]
    module = sys.modules[info.target.partition(":")[0]]
    assert module.__doc__
    for row in info.missing:
        assert isinstance(row, str)
    if info.paper:
        assert any(head in module.__doc__ for head in TABLE_HEADS)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ndef f(:\n", "syntax error in broken_plugin.py:2: invalid syntax"),
        ("\nimport no_such_package.part\n", "broken_plugin.py:2 imports 'no_such_package', which is not there; install it"),
        ("from moesim.policy import Nothing\n", "ImportError: cannot import name 'Nothing' from 'moesim.policy'"),
        ("x = 1\n\ny = z\n", "NameError: name 'z' is not defined (broken_plugin.py:3)"),
    ],
)
def test_a_module_that_cannot_be_executed_is_one_line(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    start = "a.yaml: cannot import module 'broken_plugin' of 'broken_plugin:Mine': "
    with pytest.raises(ConfigError, match="^" + re.escape(start + message)) as caught:
        make_policy("broken_plugin:Mine", "a.yaml")
    assert "\n" not in str(caught.value)


def test_a_constructor_that_raises_and_a_class_with_another_name(plugin: None) -> None:
    with pytest.raises(ConfigError, match=r"got none; unknown class 'Elsewhen'; did you mean 'Elsewhere'\?"):
        make_policy("elsewhere_plugin:Elsewhen")
    module = sys.modules["elsewhere_plugin"]
    module.Elsewhere.__init__ = eval("lambda self: 1 / 0")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"policy elsewhere_plugin:Elsewhere raised ZeroDivisionError: division by zero"):
        make_policy("elsewhere_plugin:Elsewhere")


def test_folders_are_read_again_for_modules_that_are_not_imported_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search makes some hundred policies, and reading folders again took most of a second."""
    read: list[None] = []
    policy_class("lru")
    monkeypatch.setattr("importlib.invalidate_caches", lambda: read.append(None))
    policy_class("lru")
    assert not read
    with pytest.raises(ConfigError, match="cannot import module 'not_written_yet'"):
        policy_class("not_written_yet:Mine")
    assert read


def test_a_policy_of_the_current_folder_needs_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "neighbour_plugin.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert policy_class("neighbour_plugin:Elsewhere").__name__ == "Elsewhere"
    assert sys.path[-1] == str(tmp_path)
    assert sources_digest(["neighbour_plugin:Elsewhere"]) == hashlib.sha256(PLUGIN.encode()).hexdigest()
    assert sources_digest(["lru"]) is None
    sys.modules.pop("neighbour_plugin")


# Files, the policies that are named, and the files that do not count.
SOURCES: list[tuple[dict[str, str], list[str], set[str]]] = [
    (
        {
            "with_helper.py": f"import numpy\nfrom helper_of_it import near\n{PLUGIN}",
            "helper_of_it.py": "import farther_off\nnear = 1\n", "farther_off.py": "x = 1\n", "unrelated.py": "x = 1\n",
        },
        ["with_helper:Elsewhere"],
        {"unrelated.py"},
    ),
    (  # an import runs the packages on the way
        {
            "in_packages.py": f"import outer_one.inner.near\nfrom outer_one import part\n{PLUGIN}",
            "outer_one/__init__.py": "", "outer_one/above.py": "x = 1\n", "outer_one/inner/__init__.py": "",
            "outer_one/inner/near.py": "from .next_to_near import y\nfrom ..above import x\n",
            "outer_one/inner/next_to_near.py": "y = 1\n", "outer_one/part.py": "",
        },
        ["in_packages:Elsewhere"],
        set(),
    ),
    ({"one_of_two.py": PLUGIN, "other_of_two.py": PLUGIN}, ["one_of_two:Elsewhere", "lru", "other_of_two:Elsewhere"], set()),
]  # fmt: skip


@pytest.mark.parametrize(("files", "names", "unrelated"), SOURCES)
def test_the_source_of_a_policy_is_all_that_its_files_import(
    files: dict[str, str], names: list[str], unrelated: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result must not be taken for one of the same policy with another helper."""
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    before = sources_digest(names)
    for name, text in files.items():
        Path(name).write_text(f"{text}changed = 1\n")
        after = sources_digest(names)
        assert after is not None and (after == before) == (name in unrelated), name
        before = after


def test_the_source_of_an_installed_policy_is_that_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """File by file in the order of their names, without a word of where it is installed."""
    place = tmp_path / "site-packages"
    (place / "installed_one").mkdir(parents=True)
    (place / "library_of_it.py").write_text("")
    files = {f"installed_one/{name}.py": b"x = 1\n" for name in "badc"}
    imports = "".join(f"import installed_one.{name}\n" for name in "badc")
    files["installed_one/__init__.py"] = f"import library_of_it\n{imports}{PLUGIN}".encode()
    for name, text in files.items():
        (place / name).write_bytes(text)
    monkeypatch.syspath_prepend(str(place))
    found = b"".join(name.encode() + b"\0" + files[name] for name in sorted(files))
    assert sources_digest(["installed_one:Elsewhere"]) == hashlib.sha256(found).hexdigest()


OWN_PART = """
from moesim.policies.options import option
from moesim.policies.parts.replacement import FIFO


class Newest(FIFO):
    keep: int = option(2, ge=0)


class Several:
    start = assign = choose = lambda self, *_: None
"""


@pytest.fixture
def own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module with a replacement."""
    (tmp_path / "own_part.py").write_text(OWN_PART)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_part", None)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("greedy", "got 'greedy', an assignment: this is a part; write {name: composed, assignment: greedy}"),
        (
            {"name": "mrs", "x": 1},
            "got 'mrs', a replacement: this is a part; write {name: composed, replacement: mrs}",
        ),
        (
            "none",
            "got 'none', a placement or prefetch: this is a part; write {name: composed, placement: none}",
        ),
        (
            "own_part:Newest",
            "policy own_part:Newest: expected a class with place, decide and evict (see moesim.policy.Policy), got Newest, a "
            'replacement: this is a part; write {name: composed, replacement: "own_part:Newest"}',
        ),
        (
            "moesim.policies.parts.prefetch:TopPredicted",  # it has the method of a placement, too
            "got TopPredicted, a prefetch: this is a part; write {name: composed, prefetch: ",
        ),
        ("own_part:Several", "got Several, an assignment: this is a part; write {name: composed, assignment: "),
        ("moesim.policies.parts:Setup", "got none of place, decide, evict in Setup"),
    ],
)
def test_a_part_where_a_policy_is_expected_is_named_with_its_place(own_part: None, spec: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_policy(spec, "a.yaml: policies[1]")
    assert str(error.value).startswith("a.yaml: policies[1]: ") and says in str(error.value)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"width": 3}, "it is an option of assignment beam: write assignment: {name: beam, width: 3}"),
        (
            {"replacement": {"name": "own_part:Newest"}, "keep": 3},
            'it is an option of replacement own_part:Newest: write replacement: {name: "own_part:Newest", keep: 3}',
        ),
        (
            {"replacement": "own_part:Newest", "victims": "idle"},  # of many parts: that one which is named
            'it is an option of replacement own_part:Newest: write replacement: {name: "own_part:Newest", victims: "idle"}',
        ),
        ({"keep": 3}, "options of a part are written with its name, as in replacement: {name: PART, keep: 3}"),
        ({"replacement": "no_such_module:X", "keep": 3}, "as in replacement: {name: PART, keep: 3}"),
        ({"scoope": "global"}, "did you mean 'scope'? known: assignment, cache_only"),
    ],
)
def test_an_option_of_a_part_is_named_with_its_part(own_part: None, options: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_policy({"name": "composed", **options}, "a.yaml: policies[1]")
    assert "a.yaml: policies[1]: policy composed: unknown option" in str(error.value)
    assert hint in str(error.value)
    assert ("PART" in hint) == ("PART" in str(error.value))


def test_the_hint_of_an_option_is_for_policies_that_take_the_part() -> None:
    for name in ("lru", "fiddler"):  # one has its replacement fixed, the other no parts at all
        with pytest.raises(ConfigError) as error:
            make_policy({"name": name, "u_size": 3})
        assert "it is an option of" not in str(error.value)


def _elsewhere(**changes: Any) -> None:
    module = sys.modules["elsewhere_plugin"]
    module.Changed = type("Changed", (module.Elsewhere,), changes)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"listens": "Routed"}, "expected listens to be a frozenset, got 'Routed'; write frozenset({Routed})"),
        ({"listens": frozenset({"Routed"})}, "listens names no event: 'Routed'; expected classes of moesim.policy: Fetched, "),
        ({"needs": None}, "expected needs to be a frozenset, got None; write frozenset()"),
        ({"needs": "oracle:routing"}, "expected needs to be a frozenset, got 'oracle:routing'; write frozenset()"),
        ({"needs": frozenset({"table:"})}, "needs 'table:'; expected 'scores', "),
        ({"needs": frozenset({3})}, "needs 3; expected 'scores', "),
        ({"exact": "no"}, "expected exact to be a bool, got 'no'; write True or False"),
        ({"exact": property(lambda self: self.nowhere)}, "expected the attribute exact (bool), got: 'Changed' object has no "),
    ],
)
def test_a_wrong_declaration_is_one_line(
    plugin: None, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    policy_class("elsewhere_plugin:Elsewhere")
    _elsewhere(**changes)
    for command in (["compare", "--cache", "0.5", "--policies"], ["check"]):
        assert main([*command, "elsewhere_plugin:Changed"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f": policy elsewhere_plugin:Changed: {message}" in line


def test_a_property_that_raises_is_one_line(plugin: None) -> None:
    policy_class("elsewhere_plugin:Elsewhere")
    _elsewhere(needs=property(lambda self: 1 / 0))
    with pytest.raises(
        ConfigError, match=r"^a\.yaml: policy elsewhere_plugin:Changed raised ZeroDivisionError: division by zero"
    ):
        make_policy("elsewhere_plugin:Changed", "a.yaml")


@pytest.mark.parametrize("needs", ["scores", None, frozenset({"routing"})])
def test_the_needs_of_a_part_are_checked_as_those_of_a_policy(own_part: None, needs: object) -> None:
    spec = {"name": "composed", "replacement": "own_part:Newest"}
    make_policy(spec)
    sys.modules["own_part"].Newest.needs = needs  # type: ignore[attr-defined]
    start = "a.yaml: policy composed: replacement own_part:Newest: "
    with pytest.raises(ConfigError, match=f"^{start}(expected needs to be a frozenset, got|needs 'routing'; expected)"):
        make_policy(spec, "a.yaml")
