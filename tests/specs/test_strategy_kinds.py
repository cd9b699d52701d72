"""The frameworks that core finds by the kind of a strategy."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import zsim.frameworks
from zsim.frameworks.deepspeed.parallelism import AUTOTP
from zsim.specs.experiment.framework_resolver import resolver_of
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.registry import STRATEGIES, default_kind, kinds, role_of, values_of


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
    """FSDP1 and the reference engine have data parallelism alone, FSDP1 but for Ulysses."""
    table = STRATEGIES[kind].model_construct(kind=kind)
    requested, found = resolver_of(kind).degrees(table, ParallelismTable())
    assert (requested, found.name) == (ParallelismTable(), style)
    assert found.splits_models == (kind not in ("fsdp1", "reference"))


def test_the_kinds_above_are_all() -> None:
    assert kinds() == ("ddp", "deepspeed", "fsdp1", "fsdp2", "megatron", "reference")


ROLE_NAMES = {
    "framework": "FRAMEWORK", "resolver": "RESOLVER", "training": "TRAINING", "hooks": "HOOKS",
    "report": "REPORT", "kernels": "LAYER_KERNELS", "model_families": "FAMILIES",
    "config_file": "CONFIG_FILE", "tune": "TUNING", "bounds": "BOUNDS", "checkpoint": "CHECKPOINT",
    "fields": "FIELDS", "ranges": "RANGES", "logs": "LOGS",
}  # fmt: skip


@pytest.mark.parametrize("kind", kinds())
def test_every_role_of_a_framework_is_in_the_module_that_its_table_names(kind: str) -> None:
    """A role that the table misspells, or leaves out, would silently be that of a plain framework."""
    roles = importlib.import_module(f"zsim.frameworks.{kind}").ROLES
    held = {
        (role, path.stem)
        for path in Path(zsim.frameworks.__path__[0], kind).glob("*.py")
        for role, name in ROLE_NAMES.items()
        if re.search(rf"^{name}\b", path.read_text(), re.MULTILINE)
    }
    for role in roles.keys() - {"refusals"}:  # which may be of either kind, or both
        assert role_of(kind, role, ROLE_NAMES[role])
    stated = {(role, module) for role, module in roles.items() if "." not in module}
    assert stated == held


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
