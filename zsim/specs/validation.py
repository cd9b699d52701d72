"""Turns what pydantic finds wrong with a file into one sentence a person can act on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import UnionType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from zsim.errors import InputError, did_you_mean

_FEW_KEYS = 16
Model = TypeVar("Model", bound=BaseModel)


def validated(data: Mapping[str, Any], file: str, model_type: type[Model]) -> Model:
    """`data` as a `model_type`; raises InputError with the file's name."""
    try:
        return model_type.model_validate(data)
    except ValidationError as error:
        raise_input_error(error, file, model_type)


def raise_input_error(error: ValidationError, file: str, model_type: type[BaseModel]) -> NoReturn:
    """Raises InputError for the problem of `error` that most likely explains the others.

    An unknown key comes first, because a misspelt key also shows up as a missing one.
    """
    details = error.errors(include_url=False)
    first = min(details, key=lambda detail: detail["type"] != "extra_forbidden")
    others = len(details) - 1
    more = f" (and {others} more problem{'s' if others > 1 else ''})" if others else ""
    raise InputError(f"{file}: {_sentence(first, model_type)}{more}") from None


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
    if kind == "model_type":
        message = "expected a table"
    expected = message.replace("Input should be", "expected", 1)
    expected = expected[0].lower() + expected[1:]
    hint = ""
    if kind == "literal_error" and isinstance(detail["input"], str):
        hint = did_you_mean(detail["input"], re.findall(r"'([^']*)'", message))
    return f"{where}found {_shown(detail['input'])}, {expected}{hint}"


def _known(key: str, keys: list[str]) -> str:
    """The nearest key, else all where they are few."""
    every = f"; expected one of {', '.join(keys)}" if 0 < len(keys) <= _FEW_KEYS else ""
    return did_you_mean(key, keys) or every


def _where(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location) + ": " if location else ""


def _shown(value: object) -> str:
    """The value as the file spells it, shortened; tables and lists only by what they are."""
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
    """The model class of an annotation, through `X | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        for argument in get_args(annotation):
            model = _model_in(argument)
            if model is not None:
                return model
    return None
