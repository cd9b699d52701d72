"""Writes errors on measured curves: by network into docs/collectives.md, by machine and what was left out of
the fit into README.md, curve by curve into errors.md.

python validation/curves/accuracy.py
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import expm1
from pathlib import Path
from statistics import fmean, median

from validation.curves.fit import FITS, constants_at, fit, fitted_curves
from validation.curves.measured import ALL_REDUCE, Constants, Curve, preset_constants, read_curves

TARGET = Path(__file__).resolve().parents[2] / "docs" / "collectives.md"
README = Path(__file__).parent / "README.md"
ERRORS = Path(__file__).parent / "errors.md"
MACHINES = {
    "dgx-a100-80gb": "8 A100 (DGX A100)",
    "dgx-h100": "H100 with InfiniBand, 8 to 8,192 GPUs",
    "aws-p5": "2 to 32 x p5.48xlarge (H100, EFA)",
    "hgx-b200": "8 B200 (HGX B200)",
}
BANDS: Mapping[str, tuple[int, int]] = {
    "to 64 KiB": (0, 2**16),
    "64 KiB to 1 MiB": (2**16 + 1, 2**20 - 1),
    "1 to 64 MiB": (2**20, 2**26),
    "above": (2**26 + 1, 2**62),
}
KINDS: Mapping[str, Sequence[str]] = {
    "all-reduce": ("all_reduce",),
    "gathers": ("all_gather", "reduce_scatter"),
    "all-to-all": ("all_to_all",),
}
Errors = list[float]


def errors_of(curves: Iterable[Curve], constants: Constants) -> Errors:
    """Signed relative errors of time, over the scored points."""
    return [expm1(error) for curve in curves for error in curve.errors(constants, scored=True)]


def band_errors(curve: Curve, constants: Constants) -> dict[str, Errors]:
    """Signed relative errors of time by band of sizes, over all points."""
    pairs = list(zip(curve.points, curve.errors(constants), strict=True))
    return {
        band: [expm1(error) for point, error in pairs if low <= point.size_bytes <= high]
        for band, (low, high) in BANDS.items()
    }


def with_sizes(curves: Sequence[Curve], parity: int) -> list[Curve]:
    """The curves with every other point only, of this parity."""
    return [
        replace(curve, points=tuple(p for i, p in enumerate(curve.points) if i % 2 == parity))
        for curve in curves
    ]


def without_sizes(name: str, own: Sequence[Curve]) -> Errors:
    """Errors when every other size is predicted from the rest, in both directions."""
    return [
        error
        for parity in (0, 1)
        for error in errors_of(
            with_sizes(own, 1 - parity), constants_at(name, fit(name, with_sizes(own, parity)))
        )
    ]


def without_curves(name: str, own: Sequence[Curve], is_out: Callable[[Curve], bool]) -> Errors:
    """Errors of the curves for which `is_out` holds, predicted from the others."""
    fitted = fit(name, [curve for curve in own if not is_out(curve)])
    return errors_of([curve for curve in own if is_out(curve)], constants_at(name, fitted))


def row(what: str, errors: Errors) -> str:
    absolute = [abs(error) for error in errors]
    return (
        f"| {what} | {len(errors)} | {median(absolute):.1%} | {fmean(absolute):.1%} | {max(absolute):.0%} | "
        f"{fmean(errors):+.1%} |"
    )


def band_row(what: str, curves: Sequence[Curve]) -> str:
    """Bias and median error of every band."""
    bands: dict[str, Errors] = {band: [] for band in BANDS}
    for curve in curves:
        for band, errors in band_errors(curve, preset_constants(curve.cluster.name)).items():
            bands[band] += errors
    cells = [
        f"{fmean(errors):+.0%}, {median(map(abs, errors)):.0%}" if errors else "" for errors in bands.values()
    ]
    return f"| {what} | {' | '.join(cells)} |"


def network_lines(curves: Sequence[Curve]) -> list[str]:
    """Errors by network, role, kind of collective, and band of sizes."""
    lines = list(_band_head("network, role, collectives"))
    for network in ("EFA", "InfiniBand", "RoCE", "NVLink"):
        for role in ("fit", "held"):
            for title, kinds in KINDS.items():
                own = [c for c in curves if (c.network, c.role) == (network, role) and c.kind in kinds]
                if own:
                    what = "fitted" if role == "fit" else "held out"
                    lines.append(band_row(f"{network}, {what}, {title} ({len(own)})", own))
    return lines


def machine_lines(curves: Sequence[Curve]) -> list[str]:
    """Errors of all-reduces by machine: fitted, and predicted by fits that leave something out."""
    lines = list(_error_head("machine, and what the fit did not see"))
    for name, title in MACHINES.items():
        own = fitted_curves(name, curves)
        lines.append(row(f"**{title}**, nothing left out", errors_of(own, preset_constants(name))))
        lines.append(row("every other size", without_sizes(name, own)))
        if len(own) == 1:
            continue
        alone = [error for curve in own for error in without_curves(name, own, partial(operator.is_, curve))]
        lines.append(row("each curve in turn", alone))
        lines.append(row("all above 128 GPUs", without_curves(name, own, lambda curve: curve.gpus > 128)))
        for source in ("DGX", "InfiniBand") if name == "dgx-h100" else ("HyperPod", ", p5"):
            errors = without_curves(name, own, lambda curve, source=source: source in curve.name)  # type: ignore[misc]
            lines.append(row(f"all of the source '{source.strip(', ')}'", errors))
    return lines


def curve_page(curves: Sequence[Curve]) -> list[str]:
    """errors.md: curve by curve, by band of sizes, and of those that are fitted over all sizes."""
    small = {curve.name for curve in read_curves(ALL_REDUCE)}
    shown = [curve for curve in curves if curve.name not in small or curve.network == "EFA"]
    return [
        "# Errors of measured curves",
        "",
        "Time, simulated over measured less one. Written by `python validation/curves/accuracy.py`;",
        "[collectives](../../docs/collectives.md) has them by network and machine.",
        "",
        "## By message size: bias, then median of absolute errors",
        "",
        *_band_head("curve"),
        *(band_row(f"{curve.name} ({curve.network}, {curve.role})", [curve]) for curve in shown),
        "",
        "## Fitted curves, from 64 KiB to 4 GiB",
        "",
        *_error_head("curve"),
        *(
            row(curve.name, errors_of([curve], preset_constants(curve.cluster.name)))
            for curve in curves
            if curve.role == "fit"
        ),
    ]


def _band_head(what: str) -> tuple[str, str]:
    return f"| {what} | {' | '.join(BANDS)} |", f"|---|{'---:|' * len(BANDS)}"


def _error_head(what: str) -> tuple[str, str]:
    return f"| {what} | points | median | mean | worst | bias |", "|---|---:|---:|---:|---:|---:|"


def write(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace one block of the page."""
    text = page.read_text(encoding="utf-8")
    start = f"<!-- {name}: python validation/curves/accuracy.py rewrites them -->\n"
    end = f"<!-- end of {name} -->"
    before, rest = text.split(start)
    after = rest.split(end)[1]
    page.write_text(before + start + "\n".join(lines) + "\n" + end + after, encoding="utf-8")


def main() -> None:
    assert set(MACHINES) <= set(FITS)
    curves = read_curves()
    write(TARGET, "bands", network_lines(curves))
    write(README, "curves", machine_lines(curves))
    ERRORS.write_text("\n".join(curve_page(curves)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
