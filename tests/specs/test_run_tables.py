"""`[run]`: what it refuses, and what presets bring."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.files import PRESETS
from zsim.specs.cluster.files import read_toml
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.run.failures import FailuresTable, resolve_failures
from zsim.specs.experiment.run.run import StorageTable, resolve_storage
from zsim.specs.experiment.tables import Experiment
from zsim.units import Duration, Tokens, format_duration


def run(cost: dict[str, Any] | None = None, **tables: Any) -> Experiment:
    return Experiment(model="llama-3-8b", cluster="dgx-h100", nodes=2, run=tables, cost=cost)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"failures": {"per_1000_node_days": -1}}, "found -1"),
        ({"storage": {"latency": "1 ms"}}, "storage without bandwidth"),
        ({"storage": {"write_bandwidth": "0 B/s"}}, "nothing would ever be saved"),
        ({"steps": 4, "tokens": "1T"}, "tokens and steps both say how far"),
        ({"tokens": "3T", "phases": [{"tokens": "1T"}, {"tokens": "1T"}]}, "those of the phases sum to 2e"),
        ({"checkpoint": {"every": 0}}, "found 0, expected steps (500) or a time"),
        ({"checkpoint": {"every": "3 parsecs"}}, "unknown unit 'parsecs'"),
        ({"checkpoint": {"remote_every": 4}}, "no effect with mode 'sync'"),
        ({"checkpoint": {"blocking": "9 s", "durable": "1 s"}}, "expected at least the time of blocking"),
        ({"failures": {"law": "weibull"}}, "expected law 'weibull' with a shape"),
        ({"failures": {"causes": {"a": {"share": 1}, "b": {"per_1000_node_days": 1}}}}, "a share each"),
        ({"recovery": {"stall": "1 s"}}, "it is for 'per-step'"),
        ({"recovery": {"detect": "1 s", "hang_fraction": 0.2}}, "hang_fraction has no effect"),
        ({"recovery": {"polcy": "restart"}}, "did you mean 'policy'?"),
    ],
)
def test_a_wrong_table_is_refused_with_what_is_wrong(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        run(**tables)
    assert said in str(refused.value)


def test_pipeline_rerouting_is_refused_by_name() -> None:
    with pytest.raises(NotSimulatedError, match="'oobleck' hands the work of a lost pipeline stage"):
        run(recovery={"policy": "oobleck"})


def test_a_run_and_its_price_are_for_the_same_tokens() -> None:
    assert run(cost={"tokens": 2e12}, tokens="2T").run is not None
    assert run(cost={"tokens": "2T"}, tokens=2e12).run is not None
    with pytest.raises(InputError, match=r"run.tokens is 2e\+12 and cost.tokens 3e\+12"):
        run(cost={"tokens": 3e12}, tokens="2T")


def test_llama_3s_causes_sum_to_its_419_interruptions() -> None:
    """419 in 54 days on 2,048 nodes: 3.789 per 1,000 node-days, to the rounding of twelve causes."""
    table = resolve_failures(FailuresTable(preset="llama-3-405b"))
    assert table.total_per_1000_node_days() == pytest.approx(419 / (54 * 2048) * 1000, rel=1e-4)


@pytest.mark.parametrize("name", sorted(read_toml(PRESETS / "failures.toml")))
def test_every_fleet_has_a_rate_and_a_source(name: str) -> None:
    table = resolve_failures(FailuresTable(preset=name))
    assert table.total_per_1000_node_days() > 1
    assert len(table.source) > 20


@pytest.mark.parametrize("name", sorted(read_toml(PRESETS / "storage.toml")))
def test_every_store_has_a_bandwidth_and_a_source(name: str) -> None:
    table = resolve_storage(StorageTable(preset=name))
    assert len(table.source) > 20
    assert table.write_bandwidth_per_writer or table.write_bandwidth_per_node or table.write_bandwidth


def test_what_is_said_on_top_of_a_preset_wins_and_is_assumed() -> None:
    table = resolve_storage(StorageTable.model_validate({"preset": "tectonic", "read_bandwidth": "1 GB/s"}))
    assert (table.write_bandwidth, table.read_bandwidth, table.evidence) == (2e12, 1e9, "assumed")
    assert "changed by the user: read_bandwidth" in table.source


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown 'llama-3'; did you mean 'llama-3-405b'"):
        resolve_failures(FailuresTable(preset="llama-3"))


def test_a_repair_with_a_mean_alone_is_exponential() -> None:
    """The default's median of an hour belongs to its mean of six."""
    assert FailuresTable().repair_median == 3600.0
    assert FailuresTable.model_validate({"repair": "1 min"}).repair_median is None


class _Times(BaseModel):
    model_config = ConfigDict(extra="forbid")

    takes: Duration = 0.0
    tokens: Tokens = 0.0


@pytest.mark.parametrize(
    ("text", "seconds"), [("90 s", 90.0), ("2 min", 120.0), ("1.5 h", 5400.0), ("1 day", 86_400.0)]
)
def test_durations_have_the_units_of_people(text: str, seconds: float) -> None:
    assert _Times.model_validate({"takes": text}).takes == seconds


def test_tokens_may_be_said_in_trillions() -> None:
    assert _Times.model_validate({"tokens": "15T"}).tokens == 15e12
    assert _Times.model_validate({"tokens": 2_000_000}).tokens == 2e6


def test_durations_are_shown_in_the_unit_that_fits() -> None:
    shown = [format_duration(seconds) for seconds in (0.5, 42, 210, 28_440, 4_665_600)]
    assert shown == ["500.00 ms", "42.0 s", "3.5 min", "7.9 h", "54.0 days"]


@pytest.mark.parametrize(
    ("overrides", "path", "expected"),
    [
        ({"run.checkpoint.every": "10 min"}, "checkpoint.every", "10 min"),
        ({"run.recovery.spares": 1}, "recovery.spares", 1),
        ({"run.storage.write_bandwidth": "10 GB/s"}, "storage.write_bandwidth", 10e9),
        ({"run.failures.repair": "1 h"}, "failures.repair", 3600.0),
        ({"run.checkpoint.bytes": "1 MB"}, "checkpoint.bytes", 10**6),
    ],
)
def test_one_key_of_a_run_is_changed_and_quantities_stay(
    overrides: dict[str, Any], path: str, expected: float | str
) -> None:
    """Numbers that were read from "3 us" or "2 GB/s" are quantities still when the tables are read again."""
    run = {
        "tokens": "2T",
        "checkpoint": {"every": "30 min", "blocking": "3 us", "bytes": "7 GiB", "archive_every": "1 d"},
        "storage": {"write_bandwidth_per_node": "2 GB/s", "latency": "1 ms"},
        "recovery": {"detect": "10 min"},
        "failures": {
            "repair": "2 h",
            "repair_median": "1 h",
            "causes": {"gpu": {"share": 1, "repair": "5 h"}},
        },
    }
    before = zsim.Experiment(model="llama-3-8b", cluster="dgx-h100", nodes=2, run=run)
    after = change_experiment(before, overrides)
    table, _, key = path.partition(".")
    assert getattr(getattr(after.run, table), key) == expected
    there, here = (one.model_dump()["run"] for one in (before, after))
    there[table].pop(key), here[table].pop(key)
    assert there == here
