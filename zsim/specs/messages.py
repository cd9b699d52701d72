"""Turns pydantic's validation errors into sentences that a person can act on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from zsim.errors import InputError, did_you_mean, nearest

_FEW_KEYS = 40
_MAX_LISTED = 20
# How pydantic names members of a union in a path, in place of a key.
_UNION_TAG = re.compile(
    r"(str|int|float|bool|none)$|(literal|dict|list|tuple)\[|function-|constrained-|[A-Z]"
)
Model = TypeVar("Model", bound=BaseModel)


def validated(data: Mapping[str, Any], file: str, model_type: type[Model]) -> Model:
    """`data` as a `model_type`; raises InputError with the file's name."""
    try:
        return model_type.model_validate(data)
    except ValidationError as error:
        raise_input_error(error, file, model_type)


def raise_input_error(error: ValidationError, file: str, model_type: type[BaseModel]) -> NoReturn:
    """Raises InputError for all problems in `error`: where, what was found and what was expected."""
    raise InputError(listed(file, problems_of(error, model_type))) from None


def problems_of(error: ValidationError, model_type: type[BaseModel]) -> list[str]:
    """One sentence per problem in `error`."""
    return [_sentence(detail, model_type) for detail in _distinct(error.errors(include_url=False))]


def listed(file: str, sentences: Sequence[str]) -> str:
    """Text of an error: one problem as a sentence, several numbered in one paragraph."""
    if len(sentences) == 1:
        return f"{file}: {sentences[0]}"
    shown = [f"({number}) {sentence}" for number, sentence in enumerate(sentences[:_MAX_LISTED], 1)]
    left = len(sentences) - len(shown)
    return f"{file}: {len(sentences)} problems: {'; '.join(shown)}{f'; and {left} more' if left else ''}"


def _distinct(details: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Problems to report, unknown keys first. Left out: a missing key that an unknown key of the same table
    misspells, and problems of the other types of a union with the same value."""
    unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
    found = list(unknown)
    for detail in details:
        location = detail["loc"]
        if detail["type"] == "missing":
            beside = [str(other["loc"][-1]) for other in unknown if other["loc"][:-1] == location[:-1]]
            if any(nearest(key, [str(location[-1])]) for key in beside):
                continue
        elif detail["type"] == "extra_forbidden" or any(
            other["type"] not in ("missing", "extra_forbidden")
            and other["input"] is detail["input"]
            and _UNION_TAG.match(str(location[-1]))
            and other["loc"][: len(location) - 1] == location[:-1]
            for other in found
        ):
            continue
        found.append(detail)
    return found


def _sentence(detail: ErrorDetails, model_type: type[BaseModel]) -> str:
    location, kind = detail["loc"], detail["type"]
    if kind in ("extra_forbidden", "missing"):
        where = _where(location[:-1])
        key = str(location[-1])
        if kind == "missing":
            return f"{where}missing key '{key}'"
        return f"{where}unknown key '{key}'{_known(key, _keys(model_type, location[:-1]))}"
    where = _where(location)
    message = detail["msg"]
    if kind == "value_error":
        return where + message.removeprefix("Value error, ")
    if kind in ("model_type", "dict_type"):
        message = f"expected a table{_of(_keys(model_type, location))}"
    expected = message.replace("Input should be", "expected", 1)
    expected = expected[0].lower() + expected[1:]
    hint = ""
    if kind == "literal_error" and isinstance(detail["input"], str):
        hint = did_you_mean(detail["input"], re.findall(r"'([^']*)'", message))
    return f"{where}found {_shown(detail['input'])}, {expected}{hint}"


def _known(key: str, keys: list[str]) -> str:
    """Hint: the nearest key, else all keys if they are few."""
    every = f"; expected one of {', '.join(keys)}" if 0 < len(keys) <= _FEW_KEYS else ""
    return did_you_mean(key, keys) or every


def _of(keys: list[str]) -> str:
    """The keys that a table may have, if they are few."""
    return f" of {', '.join(keys)}" if 0 < len(keys) <= _FEW_KEYS else ""


def _where(location: tuple[int | str, ...]) -> str:
    if location and str(location[-1]).startswith("constrained-"):
        location = location[:-1]
    return ".".join(str(part) for part in location) + ": " if location else ""


def _shown(value: object) -> str:
    """The value as the file spells it, shortened; a table or list by its type alone."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _keys(model_type: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys that the table at `location` may have, as files spell them."""
    annotation: Any = model_type
    for part in location:
        model = _model_in(annotation)
        if model is not None:
            by_key = {field.alias or name: field for name, field in model.model_fields.items()}
            if part in by_key:
                annotation = by_key[str(part)].annotation
                continue
        arguments = get_args(annotation)
        if get_origin(annotation) in (dict, list, tuple, Mapping) and arguments:
            annotation = arguments[-1] if arguments[-1] is not ... else arguments[0]
    model = _model_in(annotation)
    if model is None:
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model class of an annotation, also in `X | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        for argument in get_args(annotation):
            model = _model_in(argument)
            if model is not None:
                return model
    return None
