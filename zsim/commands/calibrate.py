"""`zsim calibrate`: fit a cluster file to measurements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zsim.commands.options import answer, file_option, json_option, print_file
from zsim.errors import InputError
from zsim.files import write_atomically
from zsim.specs.strategy.choices import values_of

if TYPE_CHECKING:
    from zsim.calibrate.hardware_file import Calibration
    from zsim.calibrate.kernel_fits import CurveFit


def calibrate(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="MEASUREMENTS...",
            help="JSON of validation.microbench or fio, recorded traces, output of nccl-tests, "
            f"{' or '.join(values_of('calibrate.logs'))}.",
        ),
    ],
    base: Annotated[str, typer.Option(help="Cluster preset or file whose numbers are replaced.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the new cluster; without it, of the file.")
    ] = None,
    out: Annotated[
        Path | None, file_option(metavar="FILE.toml", help="Write the cluster file there.")
    ] = None,
    page: Annotated[
        Path | None, file_option(metavar="FILE.html", help="Draw every fit beside its points.")
    ] = None,
    json_: Annotated[Path | None, json_option("the fits")] = None,
    ranks: Annotated[int | None, typer.Option(min=2, help="Ranks of a log that does not say.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of a log that does not say.")] = None,
) -> None:
    """Fit a cluster's numbers to measurements: efficiencies, latencies, rates, interference."""
    from zsim.calibrate.hardware_file import calibrate as fit_all
    from zsim.calibrate.measurements import merge_measurements
    from zsim.calibrate.readers import read_measurements
    from zsim.specs.cluster.files import load_cluster

    cluster = load_cluster(base)
    if out is not None and out.suffix != ".toml":
        raise InputError(f"--out {out}: expected a file that ends in .toml")
    measured = merge_measurements([read_measurements(path, ranks=ranks, nodes=nodes) for path in inputs])
    calibration = fit_all(
        cluster, base, name or (out.stem if out else f"{cluster.name}-calibrated"), measured
    )
    answer(_lines(calibration), calibration.to_dict, json_)
    if out is not None:
        print_file("cluster", write_atomically(out, calibration.toml()))
        load_cluster(out)
    if page is not None:
        from zsim.study.calibration_page import calibration_page

        print_file("page", write_atomically(page, calibration_page(calibration)))


def _lines(calibration: Calibration) -> Iterator[str]:
    from zsim.report.views.result import Column
    from zsim.report.views.text.plain import paragraph, table

    columns = [Column("number", is_left=True, min_width=35), Column("value", min_width=12)]
    columns += [Column(title) for title in ("rows", "median", "worst", "bias")]
    marks = ["*" if name in fit.at_bound else "" for fit in calibration.fits for name in fit.values]
    heading, *lines = table(columns, [row for fit in calibration.fits for row in _rows(fit)])
    yield heading
    yield from (line + mark for line, mark in zip(lines, marks, strict=True))
    if any(marks):
        yield "* at a limit of what is fitted"
    for note in calibration.notes:
        yield from paragraph(note, first="note    ")


def _rows(fit: CurveFit) -> Iterator[tuple[str, ...]]:
    """One row for each of the fit's numbers. The first row also says how well the curve fits."""
    for index, (name, value) in enumerate(fit.values.items()):
        label = name if "." in name else f"{fit.title}: {name}"
        row: tuple[str, ...] = (label, format_value(value, fit.units.get(name, "")))
        if index == 0 and fit.points:
            errors = f"{fit.median_error:.1%}", f"{fit.worst_error:.0%}", f"{fit.bias:+.1%}"
            row = *row, f"{len(fit.points)}", *errors
        yield row


def format_value(value: float, unit: str) -> str:
    """A number in its display unit."""
    from zsim.units import format_bytes, format_flops, format_rate, format_seconds

    if unit == "s":
        return format_seconds(value)
    if unit == "B/s":
        return format_rate(value)
    if unit == "FLOP/s":
        return format_flops(value)
    return format_bytes(value) if unit == "B" else f"{value:.4g}"
