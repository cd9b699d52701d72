"""A result as data: sections of tables, figures and sentences.

Whatever is known of how a result reads stands in these values: which columns there are, how a number is
written, which rows are totals. A renderer knows its medium alone: `views.text.plain` text of 80 columns and
Markdown, `views.text.report` a terminal with colours, `views.html.page` a page, `Displayable` a cell of
a notebook. JSON has the numbers themselves, with their units in the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from zsim.report.views.html.figure import Figure
from zsim.report.views.meanings import Meaning

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: its heading, the alignment of its cells, and its minimum width."""

    title: str
    is_left: bool = False
    min_width: int = 0


@dataclass(frozen=True, slots=True)
class Bar:
    """A fraction of a whole, in the colour that a terminal has for its meaning. Pages have figures for it."""

    fraction: float
    color: str = "default"


Cell = str | Meaning | Bar
Tone = Literal["total", "aside"]
Medium = Literal["page", "text"]
"""A page has room for more columns than the 80 characters of text."""


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A title, columns, and rows of cells. A row may lack its last cells."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    tones: Mapping[int, Tone] = field(default_factory=dict)
    """The rows that stand out or back, by their index."""


@dataclass(frozen=True, slots=True)
class ItemColumn(Generic[Item]):
    """A column of a table whose rows are items: its title, and its cell of an item."""

    title: str
    cell: Callable[[Item], Cell]
    is_left: bool = False
    where: Medium | None = None
    """The only medium that shows it. None for both."""


def table_of(
    title: str, fields: Iterable[ItemColumn[Item]], items: Iterable[Item], medium: Medium
) -> ResultTable:
    """A row for each item, with the fields that the medium shows."""
    shown = [column for column in fields if column.where in (None, medium)]
    columns = [Column(column.title, is_left=column.is_left) for column in shown]
    return ResultTable(title, columns, [[column.cell(item) for column in shown] for item in items])


def columns_of(first: str, *more: str | Column) -> list[Column]:
    """Columns of a report's table: the first and those without a title are text, the others numbers."""
    return [
        column if isinstance(column, Column) else Column(column, is_left=not (number and column))
        for number, column in enumerate((first, *more))
    ]


@dataclass(frozen=True, slots=True)
class Section:
    """Figures under a title, and a table below them."""

    title: str
    figures: Sequence[tuple[str, str, Figure | Callable[[], Figure]]] = ()
    """(id, caption, figure or the function that draws it), with ids that are unique on a page."""
    table: ResultTable | None = None
