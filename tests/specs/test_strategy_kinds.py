"""The frameworks that core finds by the kind of a strategy."""

from __future__ import annotations

import pytest

from zsim.frameworks.deepspeed.parallelism import AUTOTP
from zsim.specs.experiment.framework_resolver import resolver_of
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.choices import default_kind, values_of
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.registry import STRATEGIES, kinds


def test_an_experiment_without_a_strategy_has_the_default_one() -> None:
    experiment = Experiment(model="gpt2", cluster="dgx-h100", nodes=1)
    assert experiment.strategy.kind == default_kind() == "fsdp2"


@pytest.mark.parametrize(
    ("kind", "style"),
    [
        ("ddp", "torch"),
        ("deepspeed", "deepspeed"),
        ("fsdp1", "torch"),
        ("fsdp2", "torch"),
        ("megatron", "megatron"),
        ("reference", "torch"),
    ],
)
def test_every_kind_has_a_style_of_parallelism(kind: str, style: str) -> None:
    """FSDP1 and the reference engine have data parallelism alone."""
    table = STRATEGIES[kind].model_construct(kind=kind)
    requested, found = resolver_of(kind).degrees(table, ParallelismTable())
    assert (requested, found.name) == (ParallelismTable(), style)
    assert found.splits_models == (kind not in ("fsdp1", "reference"))


def test_the_kinds_above_are_all() -> None:
    assert kinds() == ("ddp", "deepspeed", "fsdp1", "fsdp2", "megatron", "reference")


def test_a_schedule_that_nobody_asks_for_is_one_that_the_style_has() -> None:
    for kind in kinds():
        table = STRATEGIES[kind].model_construct(kind=kind)
        style = resolver_of(kind).degrees(table, ParallelismTable())[1]
        assert style.schedule in style.schedules


def test_autotps_first_rank_has_the_largest_part() -> None:
    """5 groups of heads of 128 features on 4 ranks: 2 groups. 1,000 features of an MLP: 250."""
    assert AUTOTP.features_of_rank(1000, 4, "gate_proj", 5, 1) == 250
    assert AUTOTP.features_of_rank(640, 4, "q_proj", 5, 1) == 256


def test_values_that_name_frameworks_keep_their_order() -> None:
    assert values_of("run.checkpoint.format") == ("dcp", "deepspeed", "universal", "megatron", "full")
