"""Scripts of programs on top of Megatron: parameters, functions, own flags, variables of libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.environment import read_attention, read_environment
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.training_file import TrainingFile

NETWORK = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --max-position-embeddings 4096 "
    "--vocab-size 32000 --bf16 --global-batch-size 64"
)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.sh"
    path.write_text(f"#!/bin/bash\n{text}\n")
    return path


def experiment(config: object) -> Experiment:
    return build_experiment(
        {"cluster": "dgx-h100", "nodes": 1}, {"strategy.config": str(config)}, origin="test"
    )


@pytest.mark.parametrize("shell", ["", "bash "])
def test_words_behind_a_script_are_its_parameters_and_flags_win(tmp_path: Path, shell: str) -> None:
    path = write(
        tmp_path,
        "SIZE=$1\nSEQ=${3:-4096}\nif [ $SIZE = small ]; then MBS=2; else MBS=1; fi\n"
        f"torchrun --nproc_per_node 8 pretrain_gpt.py {NETWORK} --seq-length $SEQ --micro-batch-size $MBS "
        "--tensor-model-parallel-size $2",
    )
    found = experiment(f"{shell}{path} small 4")
    assert found.training.micro_batch_size == 2
    assert found.training.sequence_length == 4096
    assert found.parallelism.tensor == 4
    found = experiment(f"{path} large 4 2048 --micro-batch-size 4")
    assert found.training.sequence_length == 2048
    assert found.training.micro_batch_size == 4
    with pytest.raises(
        InputError, match=r"found '\$2'.*it takes parameters: '.*run.sh ARG1 ARG2 ARG3' gives"
    ):
        experiment(path)


def test_a_function_and_a_loop_that_start_training_are_followed(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"run() {{\n torchrun --nproc_per_node 8 pretrain_gpt.py {NETWORK} --seq-length 4096 "
        "--micro-batch-size $1\n}\nfor size in 1 2; do run $size; done",
    )
    found = experiment(path)
    assert found.training.micro_batch_size == 2
    assert any("2 commands start Megatron" in note for note in found.notes)
    uncalled = write(tmp_path, f"run() {{\n torchrun pretrain_gpt.py {NETWORK}\n}}")
    with pytest.raises(InputError, match=r"starts no Megatron: .*function 'run' is not called"):
        experiment(uncalled)


def test_flags_of_a_programs_own_are_noted_and_take_their_values_along(tmp_path: Path) -> None:
    flags = f"{NETWORK} --seq-length 4096 --own-sizes 1 2 --micro-batch-size 2 --use-own"
    found = experiment(write(tmp_path, f"torchrun --nproc_per_node 8 train.py {flags}"))
    assert found.training.micro_batch_size == 2
    assert any(note.endswith("not Megatron's, and not read: --own-sizes, --use-own") for note in found.notes)
    assert experiment(f"torchrun --nproc_per_node 8 train.py {flags}").training.micro_batch_size == 2


def test_a_flag_that_megatrons_own_program_would_refuse_is_refused() -> None:
    with pytest.raises(InputError, match="--own-size: Megatron has no such flag"):
        experiment(f"torchrun --nproc_per_node 8 pretrain_gpt.py {NETWORK} --seq-length 4096 --own-size 1")


def test_a_batch_that_changes_by_steps_is_refused_by_name(tmp_path: Path) -> None:
    flags = f"{NETWORK} --seq-length 4096 --micro-batch-size 1 --step-batch-size-schedule '0:8 100:16'"
    with pytest.raises(NotSimulatedError, match="a batch that grows by steps"):
        experiment(write(tmp_path, f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags}"))


def test_variables_of_nccl_force_what_they_say_and_the_rest_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "export NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_NVLS_ENABLE=0 NCCL_MAX_NCHANNELS=4 NCCL_DEBUG=INFO\n"
        f"torchrun --nproc_per_node 8 pretrain_gpt.py {NETWORK} --seq-length 4096 --micro-batch-size 1",
    )
    found = experiment(path)
    assert isinstance(found.cluster, dict)
    assert found.cluster["collectives"]["force_algorithm"] == "ring"
    assert found.cluster["collectives"]["force_protocol"] == "simple"
    assert [note for note in found.notes if "variables" in note] == [
        f"{path}: variables not read: NCCL_MAX_NCHANNELS=4"
    ]


@pytest.mark.parametrize("value", ["^NVLS", "Tree,Ring", "allreduce:tree", "CollNetDirect"])
def test_an_algorithm_that_is_no_single_one_is_named(value: str) -> None:
    file = TrainingFile("a.sh")
    read_environment(file, {"NCCL_ALGO": value, "PATH": "/bin"})
    assert file.cluster_changes == {}
    assert file.notes == [f"a.sh: variables not read: NCCL_ALGO={value}"]


@pytest.mark.parametrize(
    ("flash", "fused", "attention"),
    [("0", "0", "math"), ("0", "1", "flash"), ("1", "0", "flash2"), ("1", "1", None)],
)
def test_transformer_engine_has_the_attention_that_is_left(
    flash: str, fused: str, attention: str | None
) -> None:
    file = TrainingFile("a.sh")
    read_attention(file, {"NVTE_FLASH_ATTN": flash, "NVTE_FUSED_ATTN": fused})
    assert file.settings.get("training.attention") == attention
