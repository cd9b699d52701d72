"""`zsim run`: simulate one training step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zsim import garbage_collection
from zsim.commands.options import (
    ExperimentOptions,
    as_json,
    folder_option,
    is_output,
    json_option,
    takes_experiment,
    write_json,
)
from zsim.files import make_folder

if TYPE_CHECKING:
    from zsim.api import Result


@takes_experiment()
def run(
    asked: ExperimentOptions,
    unfold: Annotated[bool, typer.Option(help="Simulate every rank instead of one per class.")] = False,
    json_: Annotated[Path | None, json_option("the report")] = None,
    out: Annotated[
        Path | None, folder_option(help="Write report.html, report.json and trace.json.gz there.")
    ] = None,
) -> None:
    """Simulate one training step: memory, time and the reason for both."""
    with garbage_collection.paused():
        fits = _run(asked, unfold, json_, out)
    if not fits:
        raise typer.Exit(1)


def _run(asked: ExperimentOptions, unfold: bool, json_: Path | None, out: Path | None) -> bool:
    """Simulate, write and print; returns whether the job fits."""
    from zsim.report.views.text.report import print_report
    from zsim.study.advice import simulate

    result = simulate(asked.load(), unfold=unfold)
    files: dict[str, Path] = {}
    if out is not None:
        files |= _write_all(result, out)
    if is_output(json_):
        print(as_json(result.report.to_dict()), end="")
    else:
        if json_ is not None:
            files["json"] = write_json(result.report.to_dict(), json_)
        print_report(result.report, files=files)
    return result.report.fits


def _write_all(result: Result, folder: Path) -> dict[str, Path]:
    """The files that were written, by kind."""
    from zsim.report.views.html.report import write_html_report
    from zsim.trace.chrome.together import RankMarks, write_ranks_together
    from zsim.trace.chrome.write import write_chrome_trace

    make_folder(folder)
    write_html_report(result.report, result.trace, folder / "report.html")
    write_chrome_trace(result.trace, folder / "trace.json.gz")
    write_json(result.report.to_dict(), folder / "report.json")
    files = {
        "report": folder / "report.html",
        "trace": folder / "trace.json.gz",
        "json": folder / "report.json",
    }
    section = result.report.pipeline
    if section is not None:
        ranks = [RankMarks(row.first_rank, row.marks(section.num_chunks)) for row in section.rows]
        files["ranks"] = write_ranks_together(result.trace, ranks, folder / "pipeline.json.gz")
    return files
