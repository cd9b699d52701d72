"""Keys of other programs' files: each declared once, and read and written by its declaration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from zsim.programs.accelerate.keys import KEYS as ACCELERATE_KEYS
from zsim.programs.axolotl.keys import KEYS as AXOLOTL_KEYS
from zsim.programs.litgpt.keys import KEYS as LITGPT_KEYS
from zsim.programs.llama_factory.keys import KEYS as LLAMA_FACTORY_KEYS
from zsim.programs.megatron_lm.keys import KEYS as MEGATRON_KEYS
from zsim.programs.ms_swift.keys import KEYS as MS_SWIFT_KEYS
from zsim.programs.torchtitan.keys import KEYS as TORCHTITAN_KEYS
from zsim.programs.torchtune.keys import KEYS as TORCHTUNE_KEYS
from zsim.programs.trainer.keys import KEYS as TRAINER_KEYS
from zsim.programs.trl.keys import KEYS as TRL_KEYS
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.program_key import ProgramKey, tuned_mappings
from zsim.specs.key_index import first_unknown_segment

ALL_KEYS = [
    *ACCELERATE_KEYS.values(),
    *MEGATRON_KEYS,
    *TORCHTITAN_KEYS.values(),
    *TRAINER_KEYS.values(),
    *AXOLOTL_KEYS.values(),
    *LITGPT_KEYS.values(),
    *LLAMA_FACTORY_KEYS.values(),
    *MS_SWIFT_KEYS.values(),
    *TORCHTUNE_KEYS.values(),
    *TRL_KEYS.values(),
]
RESHARD = ProgramKey(
    "reshard", str, "when a unit is freed", "strategy.reshard_after_forward", is_plain=True,
    values={"default": None, "always": True, "never": False}, default="default", tuned=(True, False),
    source="a release 1.0",
)  # fmt: skip


def settings_of(key: ProgramKey, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    file = TrainingFile("a file")
    key.read(file, values)
    return file.settings, file.defaults


@pytest.mark.parametrize("key", ALL_KEYS, ids=lambda key: key.key)
def test_a_key_names_a_setting_that_an_experiment_has(key: ProgramKey) -> None:
    assert key.meaning
    if key.setting:
        assert first_unknown_segment(key.setting.split("."), Experiment) is None


@pytest.mark.parametrize("key", [key for key in ALL_KEYS if key.is_plain], ids=lambda key: key.key)
def test_a_plain_key_is_written_as_it_is_read(key: ProgramKey) -> None:
    """Of values that leave the setting open there is one at most, which is written for all others."""
    assert key.setting
    for value, setting in (key.values or {"any": "any"}).items():
        assert key.value_of(setting) == value


@pytest.mark.parametrize("key", [key for key in ALL_KEYS if key.tuned is not None], ids=lambda key: key.key)
def test_what_tune_may_change_says_where_that_was_read(key: ProgramKey) -> None:
    assert key.source
    assert key.setting


def test_a_file_says_a_setting_and_a_program_its_default() -> None:
    bucket = ProgramKey("bucket_mb", float, "MiB in a bucket", "strategy.bucket_cap_mb", True, default=25.0)
    assert settings_of(bucket, {"bucket_mb": 100.0}) == ({"strategy.bucket_cap_mb": 100.0}, {})
    assert settings_of(bucket, {}) == ({}, {"strategy.bucket_cap_mb": 25.0})
    assert settings_of(RESHARD, {"reshard": "never"}) == ({"strategy.reshard_after_forward": False}, {})
    assert settings_of(RESHARD, {"reshard": "default"}) == ({}, {})
    assert settings_of(RESHARD, {}) == ({}, {})


def test_a_default_that_the_program_states_is_a_setting() -> None:
    sharding = ProgramKey(
        "sharding", str, "what is sharded", "strategy.sharding_strategy", is_plain=True,
        default="FULL_SHARD", is_default_stated=True,
    )  # fmt: skip
    assert settings_of(sharding, {}) == ({"strategy.sharding_strategy": "FULL_SHARD"}, {})


@dataclass
class _Strategy:
    reshard_after_forward: bool | None


@dataclass
class _Job:
    strategy: _Strategy = field(default_factory=lambda: _Strategy(None))


def test_a_job_is_written_in_the_programs_words() -> None:
    assert RESHARD.write(_Job()) == "default"  # type: ignore[arg-type]
    assert RESHARD.write(_Job(_Strategy(False))) == "never"  # type: ignore[arg-type]


def test_tune_is_told_of_the_keys_that_it_may_change() -> None:
    plain = ProgramKey("length", int, "tokens", "training.sequence_length", is_plain=True)
    (row,) = tuned_mappings([plain, RESHARD])
    assert row.matches("fsdp2", "strategy.reshard_after_forward", True)
    assert not row.matches("fsdp2", "strategy.reshard_after_forward", 8)
    assert (row.instruction, row.location) == ("reshard", "file")
