"""What programs can be told: every key that a search varies is in the table, and every row has its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.programs import (
    Program,
    config_mappings,
    default_mappings,
    find_config_mapping,
    program_of,
    programs,
    readable_programs,
)
from zsim.specs.formats.program import ProgramSource

EVERY_SECOND = ("training.checkpoint_every", 2)
BY_OP = ("training.activation_checkpointing", "selective-op")


@pytest.mark.parametrize("program", readable_programs())
def test_every_row_says_how_and_where_that_was_read(program: Program) -> None:
    for row in (*config_mappings(program), *default_mappings()):
        assert row.instruction
        assert any(digit in row.source for digit in "0123456789") or row.source.startswith("[Note")
        assert set(row.kinds) <= {"deepspeed", "fsdp1", "fsdp2", "ddp"}


@pytest.mark.parametrize(
    ("program", "kind", "setting", "place"),
    [
        # The Trainer and DeepSpeed's JSON know no policy by op, and no n-th block; torchtitan 0.2 knows both.
        ("transformers", "deepspeed", BY_OP, None),
        ("transformers", "deepspeed", EVERY_SECOND, None),
        ("deepspeed", "deepspeed", BY_OP, None),
        ("deepspeed", "deepspeed", EVERY_SECOND, None),
        ("accelerate", "fsdp2", BY_OP, None),
        ("torchtitan", "fsdp2", BY_OP, "file"),
        ("torchtitan", "fsdp2", EVERY_SECOND, "file"),
        ("torchtitan-0.3", "fsdp2", EVERY_SECOND, None),
        (None, "deepspeed", BY_OP, "script"),
        (None, "fsdp2", EVERY_SECOND, "script"),
        ("transformers", "deepspeed", ("training.activation_checkpointing", "full"), "file"),
        ("deepspeed", "deepspeed", ("training.activation_checkpointing", "full"), "script"),
        ("accelerate", "fsdp1", ("training.activation_checkpointing", "full"), "file"),
        # A group size is an int, and True is one too.
        ("accelerate", "fsdp2", ("strategy.reshard_after_forward", 8), None),
        ("accelerate", "fsdp2", ("strategy.reshard_after_forward", True), "file"),
        ("torchtitan", "fsdp2", ("strategy.reshard_after_forward", 8), None),
        (None, "fsdp2", ("strategy.reshard_after_forward", 8), "file"),
        ("transformers", "fsdp2", ("training.cross_entropy", "fused_linear"), "file"),
        ("torchtitan", "fsdp2", ("training.cross_entropy", "fused_linear"), None),
        ("deepspeed", "deepspeed", ("training.cross_entropy", "fused_linear"), "script"),
        ("deepspeed", "deepspeed", ("strategy.config.zero_optimization.stage", 2), "file"),
    ],
    ids=str,
)
def test_what_can_be_told_and_where(
    program: Program | None, kind: str, setting: tuple[str, object], place: str | None
) -> None:
    found = find_config_mapping(program, kind, *setting)
    assert (None if found is None else found.location) == place


def test_another_strategy_than_the_file_has_is_one_of_ones_own() -> None:
    assert program_of("torchtitan", "deepspeed") is None
    assert program_of("torchtitan", "fsdp2") == "torchtitan"
    assert find_config_mapping("torchtitan", "deepspeed", *EVERY_SECOND) is not None


@pytest.mark.parametrize(
    ("name", "text", "program"),
    [
        ("a.yaml", "per_device_train_batch_size: 1\nfsdp: full_shard\n", "transformers"),
        ("a.yaml", "distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 8\n", "accelerate"),
        (
            "a.toml",
            "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nlocal_batch_size = 1\n",
            "torchtitan",
        ),
    ],
)
def test_an_experiment_knows_whose_file_it_was(
    tmp_path: Path, name: str, text: str, program: Program
) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = build_experiment(
        {},
        {"strategy.config": str(path), "model": "llama-3-8b", "cluster": "dgx-h100", "nodes": 1},
        origin="test",
    )
    assert found.program == program
    assert found.strategy.kind in readable_programs()[program].kinds


def test_every_program_is_called_by_a_name_of_its_own() -> None:
    names = [program.name for program in programs()]
    assert len(set(names)) == len(names) > 5
    assert [program.name for program in programs() if program.is_default] == ["torch"]
    assert sorted(readable_programs()) == [
        "accelerate", "axolotl", "deepspeed", "lingua", "litgpt", "llama-factory", "llm-foundry", "megatron",
        "ms-swift", "nanotron", "nemo-rl", "olmo", "open-instruct", "openrlhf", "oumi", "prime-rl",
        "torchtitan", "torchtitan-0.3", "torchtune", "transformers", "trl", "verl",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "program"),
    [
        ("a.yaml", "per_device_train_batch_size: 1\n", "transformers"),
        ("a.json", '{"per_device_train_batch_size": 1}', "transformers"),
        ("a.yaml", "base_model: a/b\nmicro_batch_size: 1\ngradient_checkpointing: true\n", "axolotl"),
        ("a.yaml", "stage: sft\nmodel_name_or_path: a/b\nper_device_train_batch_size: 1\n", "llama-factory"),
        ("a.json", '{"finetuning_type": "lora", "model_name_or_path": "a/b"}', "llama-factory"),
        ("a.yaml", "model: a/b\ntuner_type: lora\nper_device_train_batch_size: 1\n", "ms-swift"),
        ("a.yaml", "model:\n  _component_: torchtune.models.llama2.llama2_7b\n", "torchtune"),
        ("a.yaml", "checkpoint_dir: a/b\ntrain:\n  micro_batch_size: 1\n", "litgpt"),
        ("a.yaml", "model_name_or_path: a/b\nuse_peft: true\n", "trl"),
        ("a.yaml", "per_device_train_batch_size: 1\nmax_length: 1024\n", "trl"),
        ("a.yaml", "distributed_type: FSDP\ngradient_checkpointing: true\n", None),
        ("a.yaml", "fsdp_config:\n  sharding_strategy: FULL_SHARD\nmax_duration: 1ep\n", None),
        ("a.yml", "model:\n  tensor_model_parallel_size: 2\n", "megatron"),
        ("a.yaml", "anything: 1\n", None),
        ("a.json", '{"parallelism": {}, "training": {}}', "torchtitan-0.3"),
        ("a.json", '{"zero_optimization": {}}', None),
        ("a.sh", "torchrun pretrain_gpt.py --num-layers 2\n", "megatron"),
        ("a.toml", "[training]\nseq_len = 4096\n", None),
    ],
)
def test_a_program_recognises_what_it_alone_has(
    tmp_path: Path, name: str, text: str, program: str | None
) -> None:
    path = tmp_path / name
    path.write_text(text)
    source = ProgramSource(str(path))
    assert next((entry.name for entry in programs() if entry.recognises(source)), None) == program
