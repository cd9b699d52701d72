"""The tables that a table may hold, from the annotations of its keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zsim.specs.lazy_model import LazyKinds, LazyModel


def types_at(annotation: Any, part: int | str) -> list[Any]:
    """The types that a value of type `annotation` may have at a key or an index. A union has several, and
    None is not among them.
    """
    arguments = get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = {field.alias or name: field for name, field in annotation.model_fields.items()}
        return _members_of_field(fields[str(part)]) if part in fields else []
    origin = get_origin(annotation)
    if not isinstance(origin, type) or not arguments:
        return []
    if origin is tuple and arguments[-1] is not ... and isinstance(part, int):
        return members_of(arguments[part]) if part < len(arguments) else []
    if issubclass(origin, Mapping):
        return members_of(arguments[-1])
    return members_of(arguments[0]) if issubclass(origin, Collection) else []


def _members_of_field(field: FieldInfo) -> list[Any]:
    """The types of a key. pydantic keeps what `Annotated` says of a key beside its type."""
    tables = next((note.tables for note in field.metadata if isinstance(note, LazyKinds)), None)
    return members_of(field.annotation) if tables is None else list(tables.values())


def members_of(annotation: Any) -> list[Any]:
    """The members of a union without None, or the type itself."""
    if get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        lazy_model = next((note for note in notes if isinstance(note, LazyModel) and note.module_path), None)
        return members_of(inner if lazy_model is None else lazy_model.load_class())
    if get_origin(annotation) in (Union, UnionType):
        inner = (members_of(argument) for argument in get_args(annotation) if argument is not NoneType)
        return [member for members in inner for member in members]
    return [annotation]
