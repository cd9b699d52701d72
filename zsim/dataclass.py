"""`dataclass`, as the standard library's, but a class's methods are made when they are first called.

The standard library writes and compiles six methods per class while a module is imported, most of which
nobody calls. That takes 0.2 s of every `zsim run` for zsim's 300 classes. It also looks at each annotation
for what zsim's classes do not have, which takes a quarter as long again. `Field`, `replace`, `fields` and
`asdict` are the standard library's, and what is frozen, compared, hashed and printed is as there.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
from dataclasses import MISSING, Field
from reprlib import recursive_repr
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls: type | None = None, /, *, frozen: bool = False, slots: bool = False, eq: bool = True,
        repr: bool = True, kw_only: bool = False,
    ) -> Any:  # fmt: skip
        """The class as a dataclass, with `frozen`, `slots`, `eq`, `repr` and `kw_only` as in
        `dataclasses`.
        """

        def wrap(cls: type) -> type:
            made: list[type] = []  # the class: with slots it is another than the one that is given
            _add_methods(cls, made, frozen=frozen, eq=eq, repr=repr, slots=slots)
            _add_fields(cls, kw_only=kw_only)
            made.append(_rebuild_with_slots(cls) if slots else cls)
            return made[0]

        return wrap if cls is None else wrap(cls)


@dataclasses.dataclass(init=False, repr=False, eq=False)
class _Sample:
    """A class of the standard library's, for the marks that it puts on a class and on annotations."""

    field: int
    variable: ClassVar[int]


_FIELDS, _PARAMS, _MATCHED = "__dataclass_fields__", "__dataclass_params__", "__match_args__"
_FIELD, _VARIABLE = (field._field_type for field in getattr(_Sample, _FIELDS).values())


def _add_fields(cls: type, *, kw_only: bool) -> None:
    """Mark `cls` as a dataclass of its fields and those of its bases. Its defaults become plain values."""
    fields: dict[str, Any] = {}  # in the order of the bases, as far as they have them
    for base in reversed(cls.__mro__[1:]):
        fields |= base.__dict__.get(_FIELDS, {})
    for name, annotation in inspect.get_annotations(cls).items():
        default: Any = getattr(cls, name, MISSING)
        if isinstance(default, Field):
            field: Any = default
            if field.default is MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, field.default)
        else:  # a slot of a base is no default
            if isinstance(default, MemberDescriptorType):
                default = MISSING
            field = dataclasses.field(default=default)
        assert field.default.__class__.__hash__ is not None, f"{name}: all objects would share its default"
        fields[name], field.name, field.type = field, name, annotation
        field._field_type = _VARIABLE if str(annotation).startswith("ClassVar") else _FIELD
        field.kw_only = kw_only if field.kw_only is MISSING else field.kw_only
    setattr(cls, _FIELDS, fields)
    setattr(cls, _PARAMS, getattr(_Sample, _PARAMS))
    if _MATCHED not in cls.__dict__:
        init_fields = (field.name for field in dataclasses.fields(cls) if field.init and not field.kw_only)
        setattr(cls, _MATCHED, tuple(init_fields))
    abc.update_abstractmethods(cls)


def _rebuild_with_slots(cls: type) -> type:
    """The class once more, with slots for its fields."""
    names = [field.name for field in dataclasses.fields(cls)]
    base_slots = {slot for base in cls.__mro__[1:-1] for slot in base.__dict__.get("__slots__", ())}
    namespace = {name: value for name, value in cls.__dict__.items() if name not in names}
    for name in ("__dict__", "__weakref__"):  # of the class without slots
        namespace.pop(name, None)
    namespace["__slots__"] = tuple(name for name in names if name not in base_slots)
    slotted = type(cls)(cls.__name__, cls.__bases__, namespace)
    slotted.__qualname__ = cls.__qualname__
    return slotted


class _Factory:
    """The mark of a default that a factory makes."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


def _add_methods(
    cls: type, built: list[type], *, frozen: bool, eq: bool, repr: bool, slots: bool
) -> None:  # fmt: skip
    """Give `cls` the methods that it does not define itself, each made at its first call."""
    defined = set(cls.__dict__)
    methods: dict[str, Any] = {
        "__init__": _lazy_method(built, "__init__", lambda built_class: _init(built_class, frozen))
    }
    if "__init__" not in defined:
        methods["__signature__"] = _Signature(built, methods["__init__"], frozen=frozen)
    if repr:
        methods["__repr__"] = _repr
    if eq:
        methods["__eq__"] = _lazy_method(built, "__eq__", _eq)
        # a class that defines `__eq__` has a `__hash__` of None, which nobody wrote
        if cls.__dict__.get("__hash__") is None:
            defined.discard("__hash__")
        methods["__hash__"] = _lazy_method(built, "__hash__", _hash) if frozen else None
    if frozen:
        methods |= {"__setattr__": _refuse_assignment, "__delattr__": _refuse_deletion}
    if frozen and slots:  # else copying and pickling would assign
        methods |= {"__getstate__": _state, "__setstate__": _set_state}
    for name, method in methods.items():
        if name not in defined:
            setattr(cls, name, method)


class _Signature:
    """The attribute that `inspect.signature` asks a class for first: it makes `__init__`, and is absent."""

    def __init__(self, built: list[type], later: Callable[..., Any], *, frozen: bool) -> None:
        self._built, self._lazy_init, self._frozen = built, later, frozen

    def __get__(self, instance: object, owner: type) -> Any:
        for cls in self._built:  # none while the class is made
            if cls.__dict__["__init__"] is self._lazy_init:
                _set_method(cls, "__init__", _init(cls, self._frozen))
        raise AttributeError("__signature__")


def _set_method(cls: type, name: str, method: Callable[..., Any]) -> None:
    method.__qualname__ = f"{cls.__qualname__}.{name}"
    setattr(cls, name, method)


def _lazy_method(
    built: list[type], name: str, make: Callable[[type], Callable[..., Any]]
) -> Callable[..., Any]:
    """A method that replaces itself by the one that `make` returns, and calls that."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        built_method = make(built[0])
        _set_method(built[0], name, built_method)
        return built_method(self, *args, **kwargs)

    return method


def _init(cls: type, frozen: bool) -> Callable[..., None]:
    names: dict[str, Any] = {"_set": object.__setattr__, "_absent": _FACTORY}
    types: dict[str, Any] = {}
    positional: list[str] = ["self"]
    keyword_only: list[str] = []
    body: list[str] = []
    for field in dataclasses.fields(cls):
        value = parameter = name = field.name
        if field.default_factory is not dataclasses.MISSING:
            names[f"_make_{name}"] = field.default_factory
            parameter = f"{name}=_absent"
            value = f"_make_{name}() if {name} is _absent else {name}" if field.init else f"_make_{name}()"
        elif field.default is not dataclasses.MISSING:
            names[f"_default_{name}"] = field.default
            parameter = f"{name}=_default_{name}"
            value = name if field.init else f"_default_{name}"
        elif not field.init:
            continue
        if field.init:
            (keyword_only if field.kw_only else positional).append(parameter)
            types[name] = field.type
        body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    parameters = ", ".join([*positional, *(["*", *keyword_only] if keyword_only else [])])
    function = _compile_function("__init__", parameters, body or ["pass"], names)
    function.__annotations__ = {**types, "return": None}
    return function


def _eq(cls: type) -> Callable[..., Any]:
    names = [field.name for field in dataclasses.fields(cls) if field.compare]
    body = [
        "if other.__class__ is self.__class__:",
        f"    return {_values_text('self', names)} == {_values_text('other', names)}",
        "return NotImplemented",
    ]
    return _compile_function("__eq__", "self, other", body, {})


def _hash(cls: type) -> Callable[..., int]:
    names = [
        field.name
        for field in dataclasses.fields(cls)
        if (field.compare if field.hash is None else field.hash)
    ]
    return _compile_function("__hash__", "self", [f"return hash({_values_text('self', names)})"], {})


def _values_text(instance: str, names: list[str]) -> str:
    return f"({''.join(f'{instance}.{name}, ' for name in names)})"


def _compile_function(
    name: str, parameters: str, body: list[str], names: dict[str, Any]
) -> Callable[..., Any]:
    """The function of these lines, which may use `names`."""
    text = "\n    ".join([f"def {name}({parameters}):", *body])
    exec(text, names)
    function: Callable[..., Any] = names.pop(name)
    return function


@recursive_repr()
def _repr(self: Any) -> str:
    field_texts = (
        f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr
    )
    return f"{type(self).__qualname__}({', '.join(field_texts)})"


def _refuse_assignment(self: Any, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deletion(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
