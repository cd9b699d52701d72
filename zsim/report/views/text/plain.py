"""Tables and paragraphs as plain text of at most 80 columns, and tables in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from zsim.report.views.meanings import Meaning
from zsim.report.views.result import Bar, Cell, Column, ResultTable

WIDTH = 80
_GAP = "  "
_LEAST = 20


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """The heading, then one line per row, with columns as wide as needed. A row may lack its last cells.

    Where that is more than WIDTH, the first column shrinks down to 20 characters: its longest cells lose
    their beginnings, since the end of a name says most.
    """
    first, *other_widths = _widths(columns, rows)
    room = WIDTH - sum(other_widths) - len(_GAP) * len(other_widths)
    widths = [min(first, max(room, _LEAST)), *other_widths]
    lines = []
    for row in ([column.title for column in columns], *rows):
        cells = [
            f"{cell:<{width}}" if column.is_left else f"{cell:>{width}}"
            for column, cell, width in zip(columns, [cut(row[0], widths[0]), *row[1:]], widths, strict=False)
        ]
        lines.append(_GAP.join(cells).rstrip())
    return lines


def text_table(values: ResultTable, *, is_split: bool = False) -> list[str]:
    """The lines of a table, below its title if it has one.

    If it `is_split`, columns without room follow below. Bars are left out.
    """
    rows = [[_text_of(cell) for cell in row] for row in values.rows]
    lines = tables(values.columns, rows) if is_split else table(values.columns, rows)
    return [*([values.title] if values.title else []), *lines]


def _text_of(cell: Cell) -> str:
    if isinstance(cell, Bar):
        return ""
    return cell.label if isinstance(cell, Meaning) else cell


def tables(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """The table in parts: columns beyond WIDTH follow below, with the first column repeated."""
    first, *other_widths = _widths(columns, rows)
    column_groups: list[list[int]] = []
    room = 0
    for number, width in enumerate(other_widths, 1):
        room -= width + len(_GAP)
        if room < 0:
            column_groups.append([0])
            room = WIDTH - first - width - len(_GAP)
        column_groups[-1].append(number)
    return [
        line
        for column_group in column_groups
        for line in table(
            [columns[n] for n in column_group], [[row[n] for n in column_group] for row in rows]
        )
    ]


def named_columns(first: str, *other_titles: str, min_width: int = 0) -> list[Column]:
    """The first column, left-aligned and at least `min_width` wide, and the others, right-aligned."""
    return [Column(first, is_left=True, min_width=min_width), *(Column(title) for title in other_titles)]


def markdown(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of the table in Markdown, with cells as they are."""
    lines = ([column.title for column in columns], *rows)
    heading, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return [heading, f"|{'|'.join('---' if column.is_left else '---:' for column in columns)}|", *body]


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    lines = ([column.title for column in columns], *rows)
    return [
        max(column.min_width, *(len(line[number]) for line in lines if number < len(line)))
        for number, column in enumerate(columns)
    ]


def cut(text: str, width: int) -> str:
    """The last characters of `text`, at most `width`."""
    return text if len(text) <= width else "..." + text[len(text) - width + 3 :]


def paragraph(text: str, *, first: int | str = 0, indent: int | None = None) -> list[str]:
    """The lines of a paragraph: the first begins with `first` (text, or a number of blanks), the others with
    `indent` blanks, by default as many as `first` is wide."""
    begin = " " * first if isinstance(first, int) else first
    indentation = " " * (len(begin) if indent is None else indent)
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=begin,
        subsequent_indent=indentation,
        break_long_words=False,
        break_on_hyphens=False,
    )


def shell(command: str, indent: int = 4) -> list[str]:
    """A command to copy, continued with backslashes where it is wider than 80 columns."""
    lines = textwrap.wrap(command, WIDTH - indent - 4, break_long_words=False, break_on_hyphens=False)
    first, *continuations = lines if len(command) > WIDTH - indent else [command]
    indented = [" " * indent + first, *(" " * (indent + 2) + line for line in continuations)]
    return [*(f"{line} \\" for line in indented[:-1]), indented[-1]]
