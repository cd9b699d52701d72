"""Published memory: the distribution of its errors and the probability that a job fits."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest

from validation.published.memory import uncertain_share
from validation.published.memory_table import format_memory_table
from zsim.validated.memory import (
    COLUMNS,
    MAX_PROBABILITY,
    RAN,
    RAN_OUT,
    MemoryErrors,
    MemoryRun,
    estimate_memory_errors,
    fraction_that_ran,
    memory_runs,
    read_memory,
)
from zsim.validated.verdict import UNCERTAIN_SHARE


def run(source: str, error: float | None = None, **changes: object) -> MemoryRun:
    facts = {
        "row_id": f"{source}-1", "source": source, "role": "report", "framework": "FSDP", "is_mixture": False,
        "load": 0.9, "exact": None, "retries": 0.0, "failures": 0.0, "outcome": RAN, "kind": "allocated",
        "error": error,
    }  # fmt: skip
    return MemoryRun(**{**facts, **changes})  # type: ignore[arg-type]


def test_the_probability_is_that_of_an_error_that_still_leaves_room() -> None:
    """Errors of -0.1, 0 and +0.1, a third each, have their middles at 1/6, 1/2 and 5/6: at a load of 1 an
    error of at most 0 is needed, at exp(-0.05) one of at most 0.05, half way from 1/2 to 5/6."""
    errors = MemoryErrors(np.array([0.1, 0.0, -0.1]), np.full(3, 1 / 3), 3, 3, 0.5, 0)
    assert errors.probability(1.0) == pytest.approx(1 / 2)
    assert errors.probability(exp(-0.05)) == pytest.approx(2 / 3)
    assert errors.probability(exp(0.05)) == pytest.approx(1 / 3)


def test_the_uncertain_share_is_that_of_the_shipped_table() -> None:
    share, rows, sources = uncertain_share(memory_runs())
    assert round(share, 2) == UNCERTAIN_SHARE
    assert (rows, sources) > (100, 20)


def test_sources_count_alike_in_the_uncertain_share() -> None:
    """One source of 0.2 and of 0.4, one of 0.9; rows without their states and small ones do not count."""
    rows = [run("a", exact=0.72), run("a", exact=0.54), run("b", exact=0.09), run("b")]
    share, count, sources = uncertain_share([*rows, run("c", exact=0.1, load=0.2)])
    assert share == pytest.approx((0.3 + 0.9) / 2)
    assert (count, sources) == (3, 2)


def test_no_probability_is_0_or_1() -> None:
    errors = MemoryErrors(np.array([0.1, -0.1]), np.array([0.5, 0.5]), 2, 2, 0.5, 0)
    assert errors.probability(0.0) == errors.probability(0.1) == MAX_PROBABILITY
    assert errors.probability(10.0) == pytest.approx(1 - MAX_PROBABILITY)


def test_sources_count_alike_and_one_more_has_the_opposite_errors() -> None:
    """Two sources of one framework, +0.2 once and -0.1 three times: each half of 2/3, the mirrored source the
    rest: 1/3 on +0.2, 1/3 on -0.1, 1/6 on -0.2 and 1/6 on +0.1."""
    errors = estimate_memory_errors("FSDP", [run("a", 0.2), run("b", -0.1), run("b", -0.1), run("b", -0.1)])
    weight_of = {
        value: float(errors.weights[np.isclose(errors.values, value)].sum())
        for value in (0.2, -0.1, -0.2, 0.1)
    }
    assert weight_of == pytest.approx({0.2: 1 / 3, -0.1: 1 / 3, -0.2: 1 / 6, 0.1: 1 / 6})


def test_another_frameworks_errors_count_less_than_its_own() -> None:
    """FSDP's dense models have one source, so half the weight is its own (1 of 1 + 1), and half of the rest
    that of FSDP; of what is left each source has half: 1/2 + 1/4 + 1/8. A mixture's closest cell is empty:
    1/2 + 1/4."""
    runs = [run("a", 0.2), run("b", 0.4, framework="Megatron")]
    errors = estimate_memory_errors("FSDP", runs)
    of_fsdp = errors.weights[np.isclose(np.abs(errors.values), 0.2)].sum()
    assert of_fsdp == pytest.approx(7 / 8)
    assert errors.weights.sum() == pytest.approx(1.0)
    mixture = estimate_memory_errors("FSDP", runs, is_mixture=True)
    of_fsdp = mixture.weights[np.isclose(np.abs(mixture.values), 0.2)].sum()
    assert of_fsdp == pytest.approx(3 / 4)


def test_rows_that_numbers_are_fitted_to_have_no_part_in_the_errors() -> None:
    errors = estimate_memory_errors("FSDP", [run("a", 0.2), run("b", 0.9, role="calibrate")])
    assert (errors.rows, errors.sources) == (1, 1)
    assert errors.values.tolist() == [0.2, -0.2]


def test_rows_that_use_little_of_their_gpu_have_no_part_in_the_errors() -> None:
    errors = estimate_memory_errors("FSDP", [run("a", 0.2, load=0.25), run("b", 0.9, load=0.24)])
    assert errors.values.tolist() == [0.2, -0.2]


def test_jobs_that_run_short_fit_as_often_as_published_ones_did() -> None:
    """Two sources of which all ran, one of which none did, and half of one more: (1 + 1 + 0 + 0.5) / 4; a run
    whose outcome nobody published does not count."""
    short = [run("a", retries=3.0), run("a", failures=2.0), run("f", retries=1.0)]
    out = run("b", retries=1.0, outcome=RAN_OUT)
    unknown = run("c", retries=1.0, outcome="")
    fraction, rows = fraction_that_ran([*short, out, unknown])
    assert fraction == pytest.approx(0.625)
    assert rows == 4
    errors = estimate_memory_errors("FSDP", [*short, out, run("d", 0.0), run("e", load=1.4, retries=9.0)])
    assert errors.rows_short == 4, "a load above 1 does not fit, whatever the allocator does"
    assert errors.probability_short(0.5) == pytest.approx(0.625)


def test_a_job_that_runs_short_is_not_likelier_to_fit_than_its_tensors_are() -> None:
    errors = MemoryErrors(np.array([0.1, -0.1]), np.array([0.5, 0.5]), 2, 2, 0.4, 5)
    assert errors.probability_short(0.5) == 0.4
    assert errors.probability_short(exp(0.11)) == pytest.approx(1 - MAX_PROBABILITY)


def test_a_table_is_read_as_it_was_written() -> None:
    runs = (run("a", 0.12345, retries=2.5), run("b", None, kind="", outcome=""))
    assert read_memory(format_memory_table(runs)) == runs
    with pytest.raises(ValueError, match="other columns"):
        read_memory("row_id,load\n")


def test_the_shipped_table_has_rows_of_each_role_and_of_both_outcomes() -> None:
    runs = memory_runs()
    assert {found.role for found in runs} == {"report", "calibrate"}
    assert {RAN, RAN_OUT} <= {found.outcome for found in runs}
    assert len({found.source for found in runs if found.role == "report" and found.error is not None}) >= 9
    assert all(abs(found.error) < log(4) for found in runs if found.error is not None)
    assert COLUMNS[0] == "row_id"


def test_the_interval_is_that_of_the_middle_80_percent() -> None:
    """Eleven errors of -0.5 to +0.5, all alike: middles at 1/22, 3/22 ..., so that 10 % lies 0.6 of the way
    from the first to the second, at -0.44."""
    errors = MemoryErrors(np.linspace(-0.5, 0.5, 11), np.full(11, 1 / 11), 11, 11, 0.5, 0)
    assert errors.interval() == pytest.approx((exp(-0.44), exp(0.44)))


def test_without_errors_there_is_no_interval() -> None:
    assert MemoryErrors(np.zeros(0), np.zeros(0), 0, 0, 0.5, 0).interval() == (1.0, 1.0)
