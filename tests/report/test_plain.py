"""Tables and paragraphs of plain text keep to 80 columns."""

from __future__ import annotations

import shlex

from zsim.report.views.meanings import Meaning
from zsim.report.views.result import Bar, Column, ItemColumn, ResultTable, columns_of, table_of
from zsim.report.views.text.plain import (
    WIDTH,
    markdown,
    named_columns,
    paragraph,
    shell,
    table,
    tables,
    text_table,
)

COLUMNS = [Column("cluster", is_left=True), Column("one"), Column("two")]


def test_columns_are_as_wide_as_their_widest_cell_and_a_row_may_lack_its_last_cells() -> None:
    assert table(COLUMNS, [("a", "1,000", "2"), ("bb",)]) == [
        "cluster    one  two",
        "a        1,000    2",
        "bb",
    ]


def test_a_first_column_that_is_too_wide_loses_its_beginnings() -> None:
    """24 of 80 characters are the numbers': 56 are left, of which 3 are dots."""
    heading, line = table(COLUMNS, [("a" * 40 + "b" * 53, "1" * 10, "2" * 10)])
    assert line == "..." + "b" * 53 + "  " + "1" * 10 + "  " + "2" * 10
    assert len(line) == len(heading) == 80


def test_a_table_wider_than_a_terminal_goes_on_below() -> None:
    """Columns of 50, 20 and 20 characters: the last has no room, and stands beside the first again."""
    assert tables(COLUMNS, [["c" * 50, "1" * 20, "2" * 20]]) == [
        f"{'cluster':<50}  {'one':>20}",
        f"{'c' * 50}  {'1' * 20}",
        f"{'cluster':<50}  {'two':>20}",
        f"{'c' * 50}  {'2' * 20}",
    ]


def test_a_paragraph_goes_on_beside_its_label_or_where_it_is_told_to() -> None:
    words = "word " * 30
    labelled = paragraph(words, first="note  ")
    assert labelled[0].startswith("note  word")
    assert all(line.startswith("      word") for line in labelled[1:])
    assert max(map(len, labelled)) <= 80
    assert paragraph(words, indent=4)[1].startswith("    word")
    assert paragraph(words, indent=4)[0].startswith("word")


def test_markdown_says_on_which_side_a_column_stands() -> None:
    assert markdown(named_columns("source", "rows"), [("one", "2")]) == [
        "| source | rows |",
        "|---|---:|",
        "| one | 2 |",
    ]


def test_a_command_to_copy_is_continued_with_backslashes() -> None:
    """Whole where 80 columns hold it; pieces are one shell command again."""
    assert shell("zsim run") == ["    zsim run"]
    words = " ".join(f"--option-{number}" for number in range(12))
    lines = shell(words)
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80
    assert shlex.split("\n".join(lines).replace("\\\n", " ")) == words.split()


def test_a_path_wider_than_the_page_is_never_broken() -> None:
    path = "/a/folder/" + "x" * 100 + "/train.toml"
    lines = paragraph(f"note: {path}: no effect on a step: [job]")
    assert path in "\n".join(lines)
    assert all(len(line) <= WIDTH for line in lines if path not in line)


def test_text_shows_the_fields_of_text_and_the_labels_of_meanings_without_bars() -> None:
    fields: list[ItemColumn[int]] = [
        ItemColumn("", lambda n: Meaning(f"row {n}", "#000000", "blue"), is_left=True),
        ItemColumn("double", lambda n: f"{2 * n}"),
        ItemColumn("square", lambda n: f"{n * n}", where="page"),
        ItemColumn("", lambda n: Bar(n / 10)),
    ]
    text, page = table_of("Numbers", fields, [3], "text"), table_of("Numbers", fields, [3], "page")
    assert text_table(text) == ["Numbers", "       double", "row 3       6"]
    assert [column.title for column in page.columns] == ["", "double", "square", ""]


def test_a_table_that_is_split_goes_on_below() -> None:
    values = ResultTable("", columns_of("name", *("x" * 30 for _ in range(3))), [("a", "1", "2", "3")])
    assert len(text_table(values)) == 2
    assert len(text_table(values, is_split=True)) == 4
