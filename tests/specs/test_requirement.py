"""Settings that go with others alone: when the rule applies, and the sentence that is made from it."""

from __future__ import annotations

import pytest

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.megatron.settings.config import REQUIREMENTS, SINCE
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.strategy.requirement import SettingRequirement, check_requirements

NEEDS = SettingRequirement("bucket_size", "overlap_grad_reduce", "where all gradients are one bucket")
SET = SettingRequirement("fsdp_unit_size", "fsdp_sharding", "and it belongs to Megatron-FSDP", expected=())
EXCLUDES = SettingRequirement(
    "cuda_graph", "fsdp_sharding", "beside which it is not simulated", expected=(None,), is_simulated=False
)
OF_A_VALUE = SettingRequirement(
    "engine", "distributed_optimizer", "which has no other", values=("internevo",)
)


def table(keys: dict[str, object]) -> MegatronTable:
    return MegatronTable.model_validate({"kind": "megatron", **keys})


@pytest.mark.parametrize(
    ("requirement", "keys", "is_met"),
    [
        (NEEDS, {}, True),
        (NEEDS, {"bucket_size": 5}, False),
        (NEEDS, {"bucket_size": 5, "overlap_grad_reduce": True}, True),
        (SET, {"fsdp_unit_size": 5}, False),
        (SET, {"fsdp_unit_size": 5, "fsdp_sharding": "optim"}, True),
        (EXCLUDES, {"cuda_graph": True}, True),
        (EXCLUDES, {"cuda_graph": True, "fsdp_sharding": "optim"}, False),
        (OF_A_VALUE, {"engine": "nanotron"}, True),
        (OF_A_VALUE, {"engine": "internevo"}, False),
    ],
)
def test_a_setting_needs_another_unless_it_has_its_default(
    requirement: SettingRequirement, keys: dict[str, object], is_met: bool
) -> None:
    assert requirement.is_met(table(keys)) == is_met


@pytest.mark.parametrize(
    ("requirement", "keys", "sentence"),
    [
        (
            NEEDS,
            {"bucket_size": 5},
            "strategy.bucket_size: found 5 without overlap_grad_reduce, where all gradients are one bucket; "
            "expected overlap_grad_reduce = true, or bucket_size left out",
        ),
        (
            SET,
            {"fsdp_unit_size": 5},
            "strategy.fsdp_unit_size: found 5 without fsdp_sharding, and it belongs to Megatron-FSDP; "
            "expected fsdp_sharding as well, or fsdp_unit_size left out",
        ),
        (
            EXCLUDES,
            {"cuda_graph": True, "fsdp_sharding": "optim"},
            "strategy.cuda_graph: found true with fsdp_sharding = 'optim', beside which it is not simulated; "
            "expected fsdp_sharding left out, or cuda_graph = false",
        ),
    ],
)
def test_the_sentence_says_what_was_found_and_both_ways_out(
    requirement: SettingRequirement, keys: dict[str, object], sentence: str
) -> None:
    error = InputError if requirement.is_simulated else NotSimulatedError
    with pytest.raises(error) as raised:
        check_requirements(table(keys), [requirement])
    assert str(raised.value) == sentence


def test_every_rule_is_about_settings_of_the_table() -> None:
    keys = {requirement.key for requirement in REQUIREMENTS} | set(SINCE)
    assert keys | {requirement.needs for requirement in REQUIREMENTS} <= set(MegatronTable.model_fields)
    check_requirements(table({}), REQUIREMENTS)
