"""zsim's dataclass against the standard library's: the same classes, made both ways, do the same."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import FrozenInstanceError, field
from typing import Any

import pytest

from zsim.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Frozen, with slots: a hash by value, no dictionary."""

    name: str
    rate: float = 1.0
    users: tuple[str, ...] = ()
    note: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Cable(Link):
    """Fields of the base come first."""

    metres: int = 3


@dataclass
class Box:
    """Mutable: equal by value, no hash; a list of its own, and a field that nobody gives."""

    items: list[int] = field(default_factory=list)
    total: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.total = sum(self.items)


@dataclass(frozen=True, kw_only=True)
class Named:
    """Only by name; its own comparison, and so a hash by it."""

    first: int
    second: int = 2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and other.first == self.first

    def __hash__(self) -> int:
        return self.first


@dataclass(frozen=True, eq=False)
class Apart:
    """Equal to itself alone."""

    value: int


def standard(cls: Any, **options: Any) -> Any:
    """The same class by the standard library."""
    fields = {name: value for name, value in vars(cls).items() if name in ("__eq__", "__post_init__")}
    given = [
        (it.name, it.type, field(default=it.default, default_factory=it.default_factory, init=it.init,
                                 compare=it.compare, repr=it.repr, kw_only=it.kw_only))
        for it in dataclasses.fields(cls)
    ]  # fmt: skip
    return dataclasses.make_dataclass(cls.__name__, given, namespace=fields, **options)


def test_fields_and_replace_are_the_standard_librarys() -> None:
    assert [it.name for it in dataclasses.fields(Cable)] == ["name", "rate", "users", "note", "metres"]
    assert dataclasses.replace(Cable("a"), metres=5) == Cable("a", 1.0, (), "", 5)
    assert dataclasses.asdict(Link("a", users=("b",))) == {
        "name": "a", "rate": 1.0, "users": ("b",), "note": "",
    }  # fmt: skip


def test_values_print_and_compare_as_in_the_standard_library() -> None:
    other = standard(Link, frozen=True, slots=True)
    assert repr(Link("a", 2.0)) == "Link(name='a', rate=2.0, users=())"
    assert repr(Link("a", 2.0)) == repr(other("a", 2.0))
    assert hash(Link("a", 2.0)) == hash(other("a", 2.0)) == hash(Link("a", 2.0, note="x"))
    assert Link("a", note="x") == Link("a", note="y")
    assert Link("a") != Link("b")
    assert Link("a") != other("a")
    assert Link("a") != Cable("a")


def test_what_is_frozen_takes_no_value_and_loses_none() -> None:
    link = Link("a")
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'name'"):
        link.name = "b"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'name'"):
        del link.name
    assert link.name == "a"
    assert not hasattr(link, "__dict__")


@pytest.mark.parametrize("remade", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_and_pickles_are_equal(remade: Any) -> None:
    assert remade(Cable("a", users=("b",))) == Cable("a", users=("b",))
    assert remade(Box([1, 2])).total == 3


def test_a_mutable_class_has_values_of_its_own_and_no_hash() -> None:
    first, second = Box(), Box()
    first.items.append(1)
    assert second.items == []
    assert Box([4, 5]).total == 9
    assert Box([1]) == Box([1])
    with pytest.raises(TypeError, match="unhashable"):
        hash(Box())


def test_missing_and_unknown_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"Link.__init__\(\) missing 1 required positional argument: 'name'"):
        Link()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'nam'"):
        Link(nam="a")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional argument"):
        Named(1)  # type: ignore[call-arg]


def test_a_classs_own_methods_stay() -> None:
    assert Named(first=1, second=5) == Named(first=1)
    assert hash(Named(first=7)) == 7
    assert Apart(1) != Apart(1)
    assert len({Apart(1), Apart(1)}) == 2


def test_methods_are_made_once_and_then_are_the_classs_own() -> None:
    Link("a")
    made = Link.__init__
    Link("b")
    assert Link.__init__ is made
    assert made.__code__.co_varnames[:4] == ("self", "name", "rate", "users")


@pytest.mark.parametrize("slots", [False, True])
def test_signatures_are_the_standard_librarys_before_any_object_is_made(slots: bool) -> None:
    @dataclass(frozen=True, slots=slots)  # type: ignore[literal-required]
    class Fresh:
        """Never made here."""

        name: str
        users: list[int] = field(default_factory=list)
        total: int = field(init=False, default=0)
        note: str = field(default="x", kw_only=True)

    class Named(Fresh):
        """With a constructor of its own."""

        def __init__(self, count: int) -> None:
            super().__init__(str(count))

    assert list(inspect.signature(Named).parameters) == ["count"]
    other = standard(Fresh, frozen=True, slots=slots)
    assert str(inspect.signature(Fresh)) == str(inspect.signature(other))
    assert str(inspect.signature(Fresh)).startswith("(name: 'str', users: 'list[int]' = <factory>, *, note: ")
    assert Named(3).name == "3"
