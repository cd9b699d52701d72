"""A result as its readers have it: text, rows, figures, a page, files, and a table in a notebook."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, overload

from zsim.errors import InputError, check_choice
from zsim.extras import require
from zsim.files import check_folder, write_files
from zsim.report.views.html.figure import Figure
from zsim.report.views.result import Item, Section
from zsim.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


_MOST_ROWS = 20  # in a notebook; `to_frame` has all
Figures = Mapping[str, Callable[[], Figure]]


class Displayable(ABC):
    """A result with a text, rows and figures. In Jupyter the last line of a cell shows it as a table.

    Units are part of the rows' names: `step_seconds`, `gpu_peak_bytes`, `mfu_fraction`.
    """

    file: ClassVar[str] = ""
    """The name of its page and of its JSON. Empty where it has no page."""
    kicker: ClassVar[str] = ""
    """The word above the page's title. Empty where it is `file`."""

    @abstractmethod
    def lines(self) -> Iterable[str]:
        """The text that the command of the same name prints."""

    @abstractmethod
    def records(self) -> Sequence[Mapping[str, Any]]:
        """The rows of `to_frame`, as plain values."""

    @abstractmethod
    def to_dict(self) -> Any:
        """The content of its JSON, as plain data."""

    def headline(self) -> str:
        """One sentence, above the table in a notebook. Empty for none."""
        return ""

    def columns(self) -> Sequence[str]:
        """The columns that a notebook shows. Empty for all of them."""
        return ()

    def sections(self) -> Iterable[Section]:
        """The sections of its page, in order."""
        return ()

    def heading(self) -> tuple[str, str]:
        """The title of its page, and the summary below the title."""
        return self.headline(), ""

    def plots(self) -> Figures:
        """The figures by name, as functions that make them."""
        figures = (figure for section in self.sections() for figure in section.figures)
        return {name: draw for name, _, draw in figures if callable(draw)}

    def page(self) -> str:
        """The page as text. The same result gives the same bytes."""
        from zsim.report.views.html.page import page

        title, summary = self.heading()
        return page(title, self.kicker or self.file, self.sections(), summary)

    def pages(self) -> Mapping[str, str]:
        """The files that `save` writes: text by name."""
        if not self.file:
            return {}
        content = json.dumps(self.to_dict(), indent=1) + "\n"
        return {f"{self.file}.html": self.page(), f"{self.file}.json": content}

    @property
    def figures(self) -> tuple[str, ...]:
        """The names that `figure` takes, the one shown without a name first."""
        return tuple(self.plots())

    def figure(self, name: str | None = None) -> plotly.graph_objects.Figure:
        """A Plotly figure, the same as on the HTML page. `figures` lists the names.

        Raises InputError for an unknown name, and where there is no figure or no plotly.
        """
        plots = self.plots()
        if not plots:
            raise InputError(f"{type(self).__name__} has no figure")
        chosen = next(iter(plots)) if name is None else name
        check_choice(f"figure: found '{chosen}', ", chosen, plots)
        try:
            import plotly.graph_objects as go
        except ImportError:
            raise InputError("figures need plotly: pip install plotly") from None
        return go.Figure(plots[chosen]().to_plotly_json())

    def to_frame(self) -> pandas.DataFrame:
        """All rows as a pandas DataFrame. Units are in the columns' names."""
        require("pandas", "to_frame")
        import pandas

        return pandas.DataFrame(list(self.records()))

    def save(self, folder: str | Path) -> list[Path]:
        """Write the same files into `folder` as the command's --out. Returns their paths.

        Raises InputError where the folder cannot be written, or where the result has no files.
        """
        content = self.pages()
        if not content:
            raise InputError(f"{type(self).__name__} has no files to save")
        check_folder(Path(folder))
        return write_files(content, Path(folder))

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table(self.headline(), self.records(), self.columns(), self.figures)


def html_table(
    headline: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = (), figures: Sequence[str] = ()
) -> str:
    """The rows as HTML without scripts or styles of its own. At most 20 of them are shown."""
    from html import escape

    fragments = [f"<p>{escape(headline)}</p>"] if headline else []
    names = list(columns) or list(dict.fromkeys(name for row in rows for name in row))
    if rows:
        head = "".join(f"<th scope='col'>{escape(title_of(name))}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell_of(name, row.get(name)))}</td>" for name in names) + "</tr>"
            for row in rows[:_MOST_ROWS]
        )
        fragments.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    hints = [f"{len(rows) - _MOST_ROWS:,} more rows in .to_frame()"] if len(rows) > _MOST_ROWS else []
    if figures:
        hints.append(f"figures: {', '.join(f'.figure({name!r})' for name in figures)}")
    if hints:
        fragments.append(f"<p><small>{escape('; '.join(hints))}</small></p>")
    return "".join(fragments)


_UNITS = ("_bytes_per_second", "_seconds", "_bytes", "_fraction")


def title_of(name: str) -> str:
    """A column's name without its unit, which its cells have: `step_seconds` is "step"."""
    first, dot, last = name.rpartition(".")
    unit = next((unit for unit in _UNITS if last.endswith(unit) and last != unit[1:]), "")
    return f"{first}{dot}{last.removesuffix(unit)}".replace("_", " ")


def cell_of(name: str, value: Any) -> str:
    """A value in the unit that its column's name says. Empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if name.endswith("_bytes_per_second"):
            return format_rate(value)
        if name.endswith("seconds"):
            return format_seconds(value)
        if name.endswith("bytes"):
            return format_bytes(round(value))
        if name.endswith("_fraction"):
            return f"{100 * value:.1f} %"
        return (
            f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
        )
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {cell_of(str(key), entry)}" for key, entry in value.items())
    return str(value)


class DisplayableList(Displayable, Sequence[Item]):
    """A result that is also the sequence of its items."""

    items: tuple[Item, ...]

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        return self.items[index]
