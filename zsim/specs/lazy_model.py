"""Tables whose validators are built, and whose modules are imported, only when a file has one.

[Note: annotations of tables] Modules with many keys do not import `annotations` from `__future__`: pydantic
would compile every key's annotation from text, whenever zsim starts.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import core_schema

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


class StrictTable(BaseModel):
    """A table that people write: frozen, and without keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class FiniteTable(StrictTable):
    """A table whose numbers are finite."""

    model_config = ConfigDict(allow_inf_nan=False)


Config = TypeVar("Config")


def resolve_table(config_class: type[Config], table: BaseModel, **resolved: Any) -> Config:
    """An instance of a dataclass with the `resolved` values, and those that are as the table of the same
    names has them.
    """
    names = {field.name for field in fields(cast(Any, config_class))} & set(type(table).model_fields)
    return config_class(**{name: getattr(table, name) for name in names} | resolved)


class LazyModel:
    """Annotation of a field with a table.

    The enclosing table does not hold their validators. Building them would cost every run time that only a
    few files need. Each value is validated by its own table instead. A table given by its `module_path`,
    "module:class", is also imported only then. The field's type is `Any` while zsim runs.
    """

    def __init__(self, module_path: str = "") -> None:
        self.module_path = module_path

    def load_class(self) -> type[BaseModel]:
        """The class at `module_path`."""
        module, _, name = self.module_path.partition(":")
        return cast(type[BaseModel], getattr(importlib.import_module(module), name))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _lazy_schema(self if self.module_path else source)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(_schema_of_class(_class_of(schema["metadata"]["table"])))


class LazyKinds:
    """Annotation of a field with one of several tables, which their `kind` distinguishes.

    The tables are given by kind. Each is looked up, and its validator built, only when a value is of it.
    """

    def __init__(self, tables: Mapping[str, type[BaseModel]]) -> None:
        self.tables = tables

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def validator_of(kind: str) -> CoreSchema:
            return core_schema.no_info_plain_validator_function(
                lambda value: self.tables[kind].model_validate(value)
            )

        return core_schema.tagged_union_schema({kind: validator_of(kind) for kind in self.tables}, "kind")

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        choices = {kind: _schema_of_class(table) for kind, table in self.tables.items()}
        return handler(core_schema.tagged_union_schema(choices, "kind"))


_Table = TypeVar("_Table")
Lazy = Annotated[_Table, LazyModel()]


def _lazy_schema(table: LazyModel | type[BaseModel]) -> CoreSchema:
    return core_schema.no_info_plain_validator_function(
        lambda value: _class_of(table).model_validate(value), metadata={"table": table}
    )


def _class_of(table: LazyModel | type[BaseModel]) -> type[BaseModel]:
    return table.load_class() if isinstance(table, LazyModel) else table


def _schema_of_class(table: type[BaseModel]) -> CoreSchema:
    table.model_rebuild()
    return core_schema.definitions_schema(table.__pydantic_core_schema__, [])


Evidence = Literal["measured", "calibrated", "data sheet", "assumed"]
EVIDENCE_ORDER: tuple[Evidence, ...] = ("measured", "calibrated", "data sheet", "assumed")
Fraction = Annotated[float, Field(gt=0, le=1)]


UNSAID = "the file does not say"


class Table(FiniteTable):
    """A table of numbers with their origin. `evidence` is "assumed" unless stated."""

    source: str = Field(default=UNSAID, min_length=1, description="where the numbers come from")
    evidence: Evidence = Field(default="assumed", description="how far to trust them")
    measured_range: dict[str, tuple[float, float]] = Field(
        default_factory=dict,
        description="range of the measurements, by what varies (bytes, flops, ranks); left out: not known",
    )
    spread: dict[str, tuple[float, float]] = Field(
        default_factory=dict,
        description="lowest and highest value of numbers without a unit; left out: no range",
    )
