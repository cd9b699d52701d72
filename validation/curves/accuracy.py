"""Writes docs/collectives.md: errors on measured all-reduce curves, fitted and left out of the fit.

python validation/curves/accuracy.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import expm1
from pathlib import Path
from statistics import fmean, median

from validation.curves.fit import FITTED, Constants, Curve, constants_at, fit, preset_constants, read_curves

TARGET = Path(__file__).resolve().parents[2] / "docs" / "collectives.md"
MACHINES = {
    "dgx-a100-80gb": "8 A100 (DGX A100)",
    "dgx-h100": "H100 with InfiniBand, 8 to 8,192 GPUs",
    "aws-p5": "2 x p5.48xlarge (H100, EFA)",
    "hgx-b200": "8 B200 (HGX B200)",
}
Errors = list[float]


def errors_of(curves: Sequence[Curve], constants: Constants) -> Errors:
    """Signed relative errors of time, scored points."""
    return [expm1(error) for curve in curves for error in curve.errors(constants, scored=True)]


def with_sizes(curves: Sequence[Curve], parity: int) -> list[Curve]:
    """Only every other point of each curve."""
    return [
        replace(curve, points=tuple(p for i, p in enumerate(curve.points) if i % 2 == parity))
        for curve in curves
    ]


def without_sizes(name: str, own: Sequence[Curve]) -> Errors:
    """Every other size predicted from the rest, then the other way round."""
    return [
        error
        for parity in (0, 1)
        for error in errors_of(
            with_sizes(own, 1 - parity), constants_at(name, fit(name, with_sizes(own, parity)))
        )
    ]


def without_curves(name: str, own: Sequence[Curve], is_out: Callable[[Curve], bool]) -> Errors:
    """Some curves predicted from the others."""
    fitted = fit(name, [curve for curve in own if not is_out(curve)])
    return errors_of([curve for curve in own if is_out(curve)], constants_at(name, fitted))


def row(what: str, errors: Errors) -> str:
    absolute = [abs(error) for error in errors]
    return (
        f"| {what} | {len(errors)} | {median(absolute):.1%} | {fmean(absolute):.1%} | {max(absolute):.0%} | "
        f"{fmean(errors):+.1%} |"
    )


def lines() -> list[str]:
    """The page's tables."""
    curves = read_curves()
    head = "points | median | mean | worst | bias |\n" + "|---|---:|---:|---:|---:|---:|"
    found = [f"| machine, and what the fit did not see | {head}"]
    alone: dict[str, Errors] = {}
    for name, title in MACHINES.items():
        own = [curve for curve in curves if curve.cluster.name == name]
        found.append(row(f"**{title}**, nothing left out", errors_of(own, preset_constants(name))))
        found.append(row("every other size", without_sizes(name, own)))
        if len(own) == 1:
            continue
        for curve in own:
            alone[curve.name] = without_curves(name, own, lambda other, out=curve: other is out)  # type: ignore[misc]
        found.append(row("each curve in turn", [error for errors in alone.values() for error in errors]))
        found.append(row("all above 128 GPUs", without_curves(name, own, lambda curve: curve.gpus > 128)))
        for source in ("DGX", "InfiniBand"):
            errors = without_curves(name, own, lambda curve, source=source: source in curve.name)  # type: ignore[misc]
            found.append(row(f"all of the source '{source}'", errors))
    found += ["", f"| curve | {head}"]
    for curve in curves:
        found.append(row(curve.name, errors_of([curve], preset_constants(curve.cluster.name))))
        if curve.name in alone:
            found.append(row("... left out", alone[curve.name]))
    return found


def main() -> None:
    assert set(MACHINES) == set(FITTED)
    text = TARGET.read_text(encoding="utf-8")
    start, end = (
        "<!-- curves: python validation/curves/accuracy.py rewrites them -->\n",
        "<!-- end of curves -->",
    )
    before, rest = text.split(start)
    after = rest.split(end)[1]
    TARGET.write_text(before + start + "\n".join(lines()) + "\n" + end + after, encoding="utf-8")


if __name__ == "__main__":
    main()
