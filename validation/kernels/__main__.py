"""Compare zsim's prices of kernels with measured ones, by GPU and kind.

    python -m validation.kernels TABLES [--gpu GPU]... [--kind KIND]... [--write]

TABLES is the folder of AIConfigurator's tables as `measured.py` reads them. The figures are zsim's seconds
over the measured ones: median, quartiles, and the worst. Measured are bursts of inference kernels, forward
alone, which a step on a warm GPU at its power limit does not sustain, so that zsim's products take longer by
design: a GPU's fraction in training, not in a burst, is what its file has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median, quantiles

from validation.kernels.measured import MeasuredKernel, gpu_of_tables, read_sample
from zsim.cost.rates.gpu import kernel_seconds
from zsim.specs.cluster.files import load_gpu
from zsim.specs.presets import gpu_preset_path

ERRORS = Path(__file__).parent / "errors.md"
HEAD = """# Errors of kernels

zsim's seconds over measured ones, by kind and GPU. Written by `python -m validation.kernels TABLES --write`;
[accuracy](../../docs/accuracy.md#kernels) says of what they are.

"""
_MEDIAN = 4  # the column of `table_lines`


@dataclass(frozen=True, slots=True)
class KernelErrors:
    """The ratios of one kind of kernels on one GPU."""

    gpu: str
    kind: str
    ratios: tuple[float, ...]
    """zsim's seconds over the measured ones."""

    @property
    def quartiles(self) -> tuple[float, float, float]:
        if len(self.ratios) < 2:
            return (self.ratios[0],) * 3
        low, _, high = quantiles(self.ratios, n=4)
        return low, median(self.ratios), high

    @property
    def worst(self) -> float:
        """The ratio furthest from one."""
        return max(self.ratios, key=lambda ratio: abs(log(ratio)))


def kernel_errors(sample: Iterable[MeasuredKernel]) -> list[KernelErrors]:
    """The errors by GPU and kind, in the order in which they come."""
    ratios: dict[tuple[str, str], list[float]] = {}
    gpus = {}
    for measured in sample:
        if measured.gpu not in gpus:
            gpus[measured.gpu] = gpu_of_tables(load_gpu(gpu_preset_path(measured.gpu)))
        seconds = sum(kernel_seconds(kernel, gpus[measured.gpu]) for kernel in measured.kernels)
        ratios.setdefault((measured.kind, measured.gpu), []).append(seconds / measured.seconds)
    return [KernelErrors(gpu, kind, tuple(found)) for (kind, gpu), found in ratios.items()]


def section() -> list[str]:
    """The section of docs/accuracy.md: a line for each kind, of the table that was written last."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in ERRORS.read_text(encoding="utf-8").splitlines()[len(HEAD.splitlines()) + 2 :]
    ]
    lines = []
    for kind in dict.fromkeys(row[0] for row in rows):
        medians = sorted((float(row[_MEDIAN]), row[1]) for row in rows if row[0] == kind)
        (low, first), middle, (high, last) = medians[0], median(one for one, _ in medians), medians[-1]
        lines.append(
            f"| {kind} | {len(medians)} | {low:.2f} ({first}) | {middle:.2f} | {high:.2f} ({last}) |"
        )
    return [
        "## Kernels",
        "",
        "zsim's seconds over measured ones, for kernels of inference engines (forward only, short bursts on",
        "an idle GPU). zsim's products are slower by design: they have the rate sustained in training at the",
        "power limit. Of the medians by GPU, the lowest, middle and highest",
        "([by GPU](../validation/kernels/errors.md)).",
        "",
        "| kind | GPUs | lowest | middle | highest |",
        "|---|---:|---:|---:|---:|",
        *lines,
        "",
    ]


def table_lines(errors: Sequence[KernelErrors], *, is_markdown: bool = False) -> list[str]:
    """A line for each GPU and kind, under a head."""
    head = ("kind", "GPU", "shapes", "lower quartile", "median", "upper quartile", "worst")
    rows = [
        (one.kind, one.gpu, str(len(one.ratios)), *(f"{ratio:.2f}" for ratio in (*one.quartiles, one.worst)))
        for one in errors
    ]
    if is_markdown:
        return [
            f"| {' | '.join(head)} |",
            f"|{'---|' * 2}{'---:|' * 5}",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. 2 if there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="python -m validation.kernels", description=__doc__)
    parser.add_argument("tables", type=Path, help="the folder of measured kernels")
    parser.add_argument("--gpu", action="append", help="only this GPU, by zsim's name")
    parser.add_argument("--kind", action="append", help="only this kind")
    parser.add_argument("--write", action="store_true", help=f"write {ERRORS.name} beside this file")
    options = parser.parse_args(arguments)
    sample = (
        measured
        for measured in read_sample(options.tables)
        if (not options.gpu or measured.gpu in options.gpu)
        and (not options.kind or measured.kind in options.kind)
    )
    errors = kernel_errors(sample)
    if not errors:
        print(f"validation.kernels: {options.tables}: no tables of measured kernels", file=sys.stderr)
        return 2
    print("\n".join(table_lines(errors)))
    if options.write:
        lines = (*HEAD.splitlines(), *table_lines(errors, is_markdown=True))
        ERRORS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
