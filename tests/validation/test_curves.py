"""The fit of collectives' constants: it times as the fabric does, and predicts what it did not see."""

from __future__ import annotations

from dataclasses import replace
from math import expm1
from statistics import fmean, median

import pytest

from validation.curves.accuracy import ERRORS, TARGET, band_errors, curve_page, network_lines
from validation.curves.fit import FITS, constants_at, fit, fitted_curves
from validation.curves.measured import Curve, preset_constants, read_curves
from zsim.specs.cluster.files import load_cluster
from zsim.study.topologies.bench import bench


@pytest.fixture(scope="module")
def curves() -> list[Curve]:
    return read_curves()


def test_the_fit_times_a_curve_as_the_fabric_does(curves: list[Curve]) -> None:
    for curve in curves:
        constants = preset_constants(curve.cluster.name)
        for point, error in zip(curve.points, curve.errors(constants), strict=True):
            assert expm1(error) == pytest.approx(point.error, abs=1e-9)


def test_every_other_size_of_b200s_curve_follows_from_the_rest(curves: list[Curve]) -> None:
    """Within the 10 % asked for; docs/collectives.md has all of them, both ways round."""
    [curve] = fitted_curves("hgx-b200", curves)
    seen = replace(curve, points=curve.points[::2])
    unseen = replace(curve, points=curve.points[1::2])
    constants = constants_at("hgx-b200", fit("hgx-b200", [seen]))
    assert median(abs(expm1(error)) for error in unseen.errors(constants, scored=True)) < 0.10


def test_the_errors_written_down_are_todays(curves: list[Curve]) -> None:
    """docs/collectives.md; `python validation/curves/accuracy.py` rewrites it, left-out errors too."""
    text = TARGET.read_text(encoding="utf-8")
    for line in network_lines(curves):
        assert line in text
    assert ERRORS.read_text(encoding="utf-8").splitlines() == curve_page(curves)


def test_what_is_fitted_is_what_the_presets_have() -> None:
    """Every constant that a fit sets has a place in its preset's file."""
    for name, own in FITS.items():
        constants = preset_constants(own.preset)
        for algorithm, protocol, _field in own.starts:
            assert (algorithm, protocol) in constants, (name, algorithm, protocol)


def test_the_presets_have_what_the_fit_finds(curves: list[Curve]) -> None:
    """All-gathers between H100 nodes: the file has the fit's numbers to three digits, but for the bandwidth,
    which is the measured network's own."""
    name = "dgx-h100, gathers"
    found = constants_at(name, fit(name, fitted_curves(name, curves)))
    for algorithm, protocol, what in FITS[name].starts:
        if what != "inter_fraction":
            fitted = getattr(found[algorithm, protocol], what)
            written = getattr(preset_constants("dgx-h100")[algorithm, protocol], what)
            assert written == pytest.approx(fitted, rel=0.01), (protocol, what)


def test_no_held_out_source_chooses_a_number(curves: list[Curve]) -> None:
    """A source is fitted or held out, never both, but for all-to-alls, which have constants of their own; and
    a fit sees none of the held out."""
    sources: dict[tuple[str, str, bool], set[str]] = {}
    for curve in curves:
        source = curve.source.split("@")[0].split(":")[0]
        sources.setdefault((source, curve.cluster.name, curve.kind == "all_to_all"), set()).add(curve.role)
    assert all(len(roles) == 1 for roles in sources.values()), sources
    for name in FITS:
        assert fitted_curves(name, curves)
        assert all(curve.role == "fit" for curve in fitted_curves(name, curves))
    assert sum(curve.role == "held" for curve in curves) == 23


BARS = [
    # network, role, collectives, largest bias and median error from 1 to 64 MiB, and above
    ("EFA", "fit", "all_reduce", (0.05, 0.10), (0.05, 0.10)),
    ("EFA", "fit", "all_gather", (0.05, 0.10), (0.05, 0.10)),
    ("InfiniBand", "fit", "all_reduce", (0.05, 0.10), (0.05, 0.05)),
    ("InfiniBand", "held", "all_reduce", (0.05, 0.10), (0.05, 0.10)),
    ("RoCE", "fit", "all_gather", (0.05, 0.05), (0.10, 0.10)),
    ("RoCE", "held", "all_reduce", (0.10, 0.15), (0.05, 0.10)),
    ("RoCE", "held", "all_gather", (0.15, 0.20), (0.05, 0.05)),
    ("NVLink", "held", "all_reduce", (0.10, 0.10), (0.05, 0.10)),
]


@pytest.mark.parametrize(("network", "role", "kind", "middle", "large"), BARS)
def test_residuals_by_size_band_stay_within_their_bars(
    curves: list[Curve],
    network: str,
    role: str,
    kind: str,
    middle: tuple[float, float],
    large: tuple[float, float],
) -> None:
    """Before gathers and EFA were fitted: 1 to 64 MiB over EFA -23 % and -56 %, over RoCE -19 and -30 %."""
    own = [curve for curve in curves if (curve.network, curve.role, curve.kind) == (network, role, kind)]
    found = [band_errors(curve, preset_constants(curve.cluster.name)) for curve in own]
    for band, (most_bias, most_median) in (("1 to 64 MiB", middle), ("above", large)):
        errors = [error for bands in found for error in bands[band]]
        assert abs(fmean(errors)) < most_bias, band
        assert median(map(abs, errors)) < most_median, band


def test_an_efa_all_reduce_of_a_source_left_out_is_met_at_every_size(curves: list[Curve]) -> None:
    """2 x p5.48xlarge of the EKS blueprints: 1 to 64 MiB within 15 % each; no band is off by a quarter."""
    [curve] = [curve for curve in curves if "EKS blueprint" in curve.name]
    bands = band_errors(curve, preset_constants("aws-p5"))
    assert max(map(abs, bands["1 to 64 MiB"])) < 0.15
    assert all(abs(fmean(errors)) < 0.25 for errors in bands.values())


def test_a_network_ramp_counts_between_nodes_only() -> None:
    """P4d's 76.6 us x sqrt(64): 613 us on 64 MiB over EFA, none of it inside a node."""
    p4d = load_cluster("aws-p4d")
    simple = p4d.collectives.protocols["simple"].model_copy(update={"network_ramp": 0.0})
    without = p4d.model_copy(
        update={"collectives": p4d.collectives.model_copy(update={"protocols": {"simple": simple}})}
    )
    for nodes, seconds in ((1, 0.0), (2, 8 * 76.6e-6)):
        [ramped], [plain] = (bench(cluster, nodes, "all_gather", sizes=[2**26]) for cluster in (p4d, without))
        assert ramped.seconds - plain.seconds == pytest.approx(seconds, abs=1e-9)
