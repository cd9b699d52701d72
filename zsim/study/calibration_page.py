"""A calibration as an HTML page: every fit and the points that it was fitted to."""

from __future__ import annotations

from zsim.calibrate.hardware_file import Calibration
from zsim.calibrate.kernel_fits import CurveFit
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.html.page import page
from zsim.report.views.result import Column, ResultTable, Section, columns_of

_MEASURED, _FITTED, _ERROR = "#1f77b4", "#d95f02", "#7f7f7f"
_UPPER, _LOWER = (0.342, 1.0), (0.0, 0.282)  # of the height


def calibration_page(calibration: Calibration) -> str:
    """One card per fit: measured and fitted seconds over size, and the signed errors."""
    sections = [_section(number, fit) for number, fit in enumerate(calibration.fits)]
    machines = "; ".join(calibration.machines)
    return page(f"Calibration of {calibration.name}", "calibration", sections, machines)


def _section(number: int, fit: CurveFit) -> Section:
    rows = [[name, f"{value:.4g}", fit.units.get(name, "")] for name, value in fit.values.items()]
    if fit.at_bound:
        rows.append(["not told by these points", ", ".join(fit.at_bound), ""])
    values = ResultTable("", columns_of("number", "value", Column("unit", is_left=True)), rows)
    if not fit.points:
        return Section(fit.title, table=values)
    caption = (
        f"{len(fit.points)} points from {', '.join(fit.sources)}: median error {fit.median_error:.1%}, worst "
        f"{fit.worst_error:.0%}, bias {fit.bias:+.1%}. Blue is measured, orange what the fitted numbers say."
    )
    return Section(fit.title, [(f"fit{number}", caption, fit_figure(fit))], values)


def fit_figure(fit: CurveFit) -> Figure:
    """Seconds over size, both logarithmic, above the signed error of each point in percent."""
    figure = Figure(layout(460))
    xs, labels = [point.x for point in fit.points], [point.label for point in fit.points]
    for name, color, symbol, ys in (
        ("measured", _MEASURED, "circle", [point.measured_seconds for point in fit.points]),
        ("fitted", _FITTED, "x", [point.predicted_seconds for point in fit.points]),
    ):
        figure.add_scatter(
            x=xs, y=ys, text=labels, name=name, mode="markers",
            marker={"color": color, "symbol": symbol, "size": 7}, hovertemplate="%{text}<br>%{y:.3g} s",
        )  # fmt: skip
    errors = [100 * point.error for point in fit.points]
    figure.add_scatter(
        x=xs, y=errors, text=labels, showlegend=False, mode="markers", xaxis="x2", yaxis="y2",
        marker={"color": _ERROR, "size": 6}, hovertemplate="%{text}<br>%{y:+.1f} %",
    )  # fmt: skip
    figure.update_xaxes(type="log", dtick=1, matches="x2", showticklabels=False)
    figure.update_xaxes("xaxis2", type="log", dtick=1, title_text=next(iter(fit.ranges), ""), anchor="y2")
    figure.update_yaxes(
        type="log", title_text="seconds", dtick=1, exponentformat="SI", automargin=True, domain=_UPPER
    )
    figure.update_yaxes(
        "yaxis2", title_text="error, %", zeroline=True, automargin=True, anchor="x2", domain=_LOWER
    )
    return figure
