"""Turns pydantic's validation errors into sentences that a person can act on."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NoReturn, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import ErrorDetails

from zsim.errors import MAX_LIST_LETTERS, InputError, did_you_mean, expected_text, nearest, shorten
from zsim.specs.key_index import nearest_key, types_at
from zsim.specs.lazy_model import StrictTable

_MAX_LISTED = 20
# Other names of values, for which spelling finds none.
_OTHER_NAMES = {"ulysses": "all-to-all", "ring": "p2p"}
# What a person writes, by pydantic's name of the problem: its own words name types of Python.
_FILE_TERMS = {
    "tuple_type": "a list", "list_type": "a list", "set_type": "a list", "frozen_set_type": "a list",
    "bool_type": "true or false", "bool_parsing": "true or false", "string_type": "a valid string",
    "int_type": "a valid integer", "float_type": "a valid number", "none_required": "it left out",
    "invalid_key": "a string as the key", "dict_type": "a table", "model_type": "a table",
    "model_attributes_type": "a table", "is_instance_of": "a table",
}  # fmt: skip
Model = TypeVar("Model", bound=BaseModel)


class TypedTable(StrictTable):
    """A table whose mistakes are `InputError`s of one paragraph. A strategy's kind counts as given.

    It is built at once, so that a notebook shows the keys of its signature before it is first called.
    """

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.model_rebuild(force=True)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            table = handler(mark_misplaced_booleans(data, [cls]))
        except ValidationError as error:
            raise InputError(format_problems(cls.__name__, problems_of(error, cls))) from None
        if "kind" in cls.model_fields:
            table.__pydantic_fields_set__.add("kind")
        return table


def validate_table(data: Mapping[str, Any], file: str, model_type: type[Model]) -> Model:
    """`data` as a `model_type`. Raises InputError with the file's name."""
    try:
        return model_type.model_validate(mark_misplaced_booleans(data, [model_type]))
    except ValidationError as error:
        raise_input_error(error, file, model_type)


def raise_input_error(error: ValidationError, file: str, model_type: type[BaseModel]) -> NoReturn:
    """Raises InputError for all problems in `error`: where each is, its value, and what was expected."""
    raise InputError(format_problems(file, problems_of(error, model_type))) from None


def problems_of(
    error: ValidationError, model_type: type[BaseModel], strategy_keys: Collection[str] | None = None
) -> list[str]:
    """One sentence per problem in `error`. `strategy_keys` are those of `nearest_key`."""
    details = error.errors(include_url=False)
    problems = _unique_problems(details, model_type)
    return [_sentence(detail, details, model_type, strategy_keys) for detail in problems]


def format_problems(file: str, sentences: Sequence[str]) -> str:
    """Text of an error. One problem is a sentence, several are numbered in one paragraph."""
    if len(sentences) == 1:
        return f"{file}: {sentences[0]}"
    lines = [f"({number}) {sentence}" for number, sentence in enumerate(sentences[:_MAX_LISTED], 1)]
    extra = len(sentences) - len(lines)
    return f"{file}: {len(sentences)} problems: {'; '.join(lines)}{f'; and {extra} more' if extra else ''}"


def _unique_problems(details: Sequence[ErrorDetails], model_type: type[BaseModel]) -> list[ErrorDetails]:
    """The problems to report, unknown keys first.

    A missing key is left out if an unknown key of the same table misspells it. Where a union has a problem
    with a value, the problems of its other types with the same value are left out. If one type accepted the
    value and found something wrong inside it, the other types do not count.
    """
    unknown_keys = [detail for detail in details if detail["type"] == "extra_forbidden"]
    problems = list(unknown_keys)
    for detail in details:
        location = detail["loc"]
        if detail["type"] == "missing":
            sibling_keys = [
                str(sibling["loc"][-1]) for sibling in unknown_keys if sibling["loc"][:-1] == location[:-1]
            ]
            if any(nearest(key, [str(location[-1])]) for key in sibling_keys):
                continue
        elif detail["type"] == "extra_forbidden" or any(
            problem["type"] not in ("missing", "extra_forbidden")
            and problem["input"] is detail["input"]
            and location
            and path_in_file(location, model_type) == path_in_file(location[:-1], model_type)
            and problem["loc"][: len(location) - 1] == location[:-1]
            for problem in problems
        ):
            continue
        problems.append(detail)
    return [detail for detail in problems if not _is_superseded(detail, details, model_type)]


def _is_superseded(
    detail: ErrorDetails, details: Sequence[ErrorDetails], model_type: type[BaseModel]
) -> bool:
    """Whether the problem belongs to one member of a union, and another member has a problem deeper inside
    the value.
    """
    location = detail["loc"]
    path = path_in_file(location, model_type)
    if not location or location[-1] == "[key]" or path != path_in_file(location[:-1], model_type):
        return False
    paths = (path_in_file(candidate["loc"], model_type) for candidate in details)
    return any(len(deeper_path) > len(path) and deeper_path[: len(path)] == path for deeper_path in paths)


def _sentence(
    detail: ErrorDetails,
    details: Sequence[ErrorDetails],
    model_type: type[BaseModel],
    strategy_keys: Collection[str] | None,
) -> str:
    location, kind = detail["loc"], detail["type"]
    if kind in ("extra_forbidden", "missing"):
        where = _location_prefix(location[:-1], model_type)
        key = str(location[-1])
        if kind == "missing":
            return f"{where}missing key '{key}'"
        hint = _key_hint(key, detail["input"], location[:-1], model_type, strategy_keys)
        return f"{where}unknown key '{key}'{hint}"
    where = _location_prefix(location, model_type)
    message = detail["msg"]
    if kind == "value_error":
        return where + message.removeprefix("Value error, ")
    hint = ""
    if kind == "literal_error" and isinstance(detail["input"], str):
        hint = did_you_mean(
            _OTHER_NAMES.get(detail["input"].lower(), detail["input"]), re.findall(r"'([^']*)'", message)
        )
    return f"{where}found {_format(detail['input'])}, expected {_expected(detail, details, model_type)}{hint}"


def _expected(detail: ErrorDetails, details: Sequence[ErrorDetails], model_type: type[BaseModel]) -> str:
    """Describes the values that a file may have there. For a union, all that its members accept."""
    kind, location = detail["type"], detail["loc"]
    if kind in ("model_type", "dict_type"):
        return f"a table{_keys_phrase(_keys(model_type, location))}"
    if kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        limit = detail["ctx"]["min_length" if kind.endswith("short") else "max_length"]
        noun = "character" if kind.startswith("string") else "item"
        bound = "at least" if kind.endswith("short") else "at most"
        return f"{bound} {limit} {noun}{'' if limit == 1 else 's'}"
    if kind not in _FILE_TERMS:
        return detail["msg"].removeprefix("Input should be ").replace("String should", "a string that should")
    path = path_in_file(location, model_type)
    kinds = [
        candidate["type"]
        for candidate in details
        if candidate["input"] is detail["input"] and path_in_file(candidate["loc"], model_type) == path
    ]
    expectations = list(
        dict.fromkeys(_FILE_TERMS[error_type] for error_type in kinds if error_type in _FILE_TERMS)
    )
    value, text = detail["input"], _format(detail["input"])
    items = [item for annotation in _walk(location, model_type)[1] for item in types_at(annotation, 0)]
    if "a list" in expectations and type(value) in items and len(text) <= 40:
        expectations[expectations.index("a list")] = f"a list, such as [{text}]"
    return " or ".join(
        [", ".join(expectations[:-1]), expectations[-1]] if len(expectations) > 1 else expectations
    )


def _key_hint(
    key: str,
    value: Any,
    table: tuple[int | str, ...],
    model_type: type[BaseModel],
    strategy_keys: Collection[str] | None,
) -> str:
    """Hint about an unknown key: the nearest key, another table that has the key, or the keys that the table
    may have.
    """
    hint = nearest_key(key, value, _keys(model_type, table), model_type, strategy_keys=strategy_keys)
    if hint:
        return hint
    names = [part for part in table if isinstance(part, str)]
    is_explained = names and getattr(model_type, "is_explained", False)
    return expected_text(key, _keys(model_type, table), f"zsim explain {names[-1]}" if is_explained else "")


def _keys_phrase(keys: list[str]) -> str:
    """The keys that a table may have, if they fit into a sentence."""
    text = ", ".join(keys)
    return f" of {text}" if 0 < len(text) <= MAX_LIST_LETTERS else ""


def _location_prefix(location: tuple[int | str, ...], model_type: type[BaseModel]) -> str:
    path = path_in_file(location, model_type)
    return ".".join(str(part) for part in path) + ": " if path else ""


def path_in_file(location: tuple[int | str, ...], model_type: type[BaseModel]) -> tuple[int | str, ...]:
    """The path to a value as the file has it: keys, and indices of items.

    pydantic's names for the members of a union and its mark of a key that is wrong itself are left out.
    """
    return _walk(location, model_type)[0]


def _walk(
    location: tuple[int | str, ...], model_type: type[BaseModel]
) -> tuple[tuple[int | str, ...], list[Any]]:
    """The path that `path_in_file` returns, and the types that the value there may have."""
    path: list[int | str] = []
    choices: list[Any] = [model_type]
    is_inside = True  # of a union: the part that chose its member is behind
    for part in location:
        if part == "[key]":
            continue
        if len(choices) > 1 and not is_inside:
            is_inside = True
            continue
        choices = [choice for annotation in choices for choice in types_at(annotation, part)] or [Any]
        is_inside = False
        path.append(part)
    return tuple(path), choices


class _Boolean:
    """A boolean where a number is meant. pydantic would take it for 0 or 1, but no validator accepts it."""

    __slots__ = ("value",)

    def __init__(self, value: bool) -> None:
        self.value = value

    def __repr__(self) -> str:
        return str(self.value).lower()


def mark_misplaced_booleans(data: Any, types: Sequence[Any]) -> Any:
    """The data of a file for one of `types`, in which booleans where numbers are meant are replaced by an
    object that pydantic refuses.
    """
    if isinstance(data, bool):
        is_number = any(map(_takes_numbers, types)) and not any(map(_takes_booleans, types))
        return _Boolean(data) if is_number else data
    if not types or not isinstance(data, Mapping | list | tuple):
        return data
    items = data.items() if isinstance(data, Mapping) else enumerate(data)
    changes = {}
    for part, value in items:
        if not _has_booleans(value):  # no type is asked for in vain: that of a table may be still to import
            continue
        inner_types = [choice for annotation in types for choice in types_at(annotation, part)]
        marked_value = mark_misplaced_booleans(value, inner_types)
        if marked_value is not value:
            changes[part] = marked_value
    if not changes:
        return data
    if isinstance(data, Mapping):
        return {**data, **changes}
    return [changes.get(number, value) for number, value in enumerate(data)]


def _has_booleans(data: Any) -> bool:
    if isinstance(data, Mapping | list | tuple):
        return any(map(_has_booleans, data.values() if isinstance(data, Mapping) else data))
    return isinstance(data, bool)


def _takes_numbers(annotation: Any) -> bool:
    return annotation in (int, float) or any(type(literal) is int for literal in _values(annotation))


def _takes_booleans(annotation: Any) -> bool:
    return annotation is bool or any(type(literal) is bool for literal in _values(annotation))


def _values(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _format(value: object) -> str:
    """The value as the file spells it, shortened. A table or a list is named by its type alone."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    return shorten(repr(value))


def _keys(model_type: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys that the table at `location` may have, as files spell them."""
    choices = _walk(location, model_type)[1]
    models = (choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel))
    model = next(models, None)
    return [] if model is None else [field.alias or name for name, field in model.model_fields.items()]
