"""torchtitan's TOML and command line as experiments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.expect import of_kind
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.ddp.settings import DdpTable
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.programs.torchtitan.read import read_torchtitan
from zsim.programs.torchtitan.write import WRITER, torchtitan_toml
from zsim.specs.experiment.load import build_experiment, load_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

NEW = """
[job]
dump_folder = "./outputs"

[model]
name = "llama3"
flavor = "8B"

[optimizer]
name = "AdamW"
lr = 3e-4

[training]
local_batch_size = 2
seq_len = 8192
steps = 1000

[parallelism]
data_parallel_shard_degree = -1

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
OLD = """
[model]
name = "llama3"
flavor = "8B"
norm_type = "rmsnorm"

[training]
batch_size = 2
seq_len = 8192
warmup_steps = 200
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
compile = true

[experimental]
pipeline_parallel_degree = 1

[activation_checkpoint]
mode = 'selective'
selective_ac_option = '2'

[float8]
enable_float8_linear = false
"""


def written(folder: Path, text: str, name: str = "train.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def imported(config: str, **overrides: Any) -> Experiment:
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    return build_experiment(
        {"cluster": "dgx-h100", "nodes": 2}, {"strategy.config": config, **changes}, origin="test"
    )


def test_a_toml_is_an_fsdp2_experiment(tmp_path: Path) -> None:
    """Batch 2 x 8192 tokens as it says; clipping at 1.0, bf16 gathers and fp32 reductions by default."""
    experiment = imported(written(tmp_path, NEW))
    training, strategy = experiment.training, of_kind(experiment.strategy, Fsdp2Table)
    assert experiment.model == "llama-3-8b"
    assert (training.micro_batch_size, training.sequence_length) == (2, 8192)
    assert (training.activation_checkpointing, training.checkpoint_stops_early) == ("selective-op", False)
    assert training.gradient_clipping == 1.0
    assert (strategy.kind, strategy.wrapping) == ("fsdp2", "torchtitan")
    assert (strategy.param_dtype, strategy.reduce_dtype) == ("bf16", "fp32")


def test_keys_without_effect_are_named_in_one_note(tmp_path: Path) -> None:
    path = written(tmp_path, NEW)
    assert f"{path}: no effect on a step: [job], optimizer.lr, training.steps" in imported(path).notes


def test_the_spellings_of_2024_are_understood(tmp_path: Path) -> None:
    """Every second block checkpointed is "full" every 2; `training.compile` is today's `compile.enable`."""
    training = imported(written(tmp_path, OLD)).training
    assert (training.micro_batch_size, training.compile) == (2, True)
    assert (training.activation_checkpointing, training.checkpoint_every) == ("full", 2)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    config = (
        f"{written(tmp_path, NEW)} --training.seq_len=4096 --training.local-batch-size 1 --compile.enable"
    )
    training = imported(config).training
    assert (training.sequence_length, training.micro_batch_size, training.compile) == (4096, 1, True)


def test_a_command_line_may_be_longer_than_a_path(tmp_path: Path) -> None:
    """File systems take names of 255 bytes; the line below has more, and stands in an experiment file."""
    config = f"{written(tmp_path, NEW)} {'--training.steps=10 ' * 20}--training.seq_len=4096"
    assert imported(config).training.sequence_length == 4096
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(f'cluster = "dgx-h100"\n[strategy]\nconfig = "{config}"\n')
    assert load_experiment(experiment).training.sequence_length == 4096


def test_a_whole_torchrun_line_gives_the_number_of_gpus(tmp_path: Path) -> None:
    config = (
        "torchrun --nproc_per_node=8 --nnodes 4 --rdzv_backend c10d -m torchtitan.train "
        f"--job.config_file {written(tmp_path, NEW)}"
    )
    experiment = build_experiment({"cluster": "dgx-h100"}, {"strategy.config": config}, origin="test")
    assert (experiment.nodes, experiment.gpus) == (4, 32)


def test_run_train_with_its_variables_is_understood(tmp_path: Path) -> None:
    config = f"NGPU=8 CONFIG_FILE={written(tmp_path, NEW)} ./run_train.sh --training.seq_len 2048"
    file = read_torchtitan(config)
    assert (file.settings["gpus"], file.settings["training.sequence_length"]) == (8, 2048)


def test_a_registered_function_of_0_3_has_its_settings() -> None:
    """llama3_8b: 1 x 8192; 0.3 checkpoints selectively by op and recomputes to the end."""
    experiment = imported("--module llama3 --config llama3_8b activation-checkpoint:full")
    training = experiment.training
    assert (training.micro_batch_size, training.sequence_length) == (1, 8192)
    assert (training.activation_checkpointing, training.checkpoint_stops_early) == ("full", False)


def test_the_json_that_0_3_saves_is_read(tmp_path: Path) -> None:
    saved = {
        "training": {"local_batch_size": 4, "seq_len": 4096, "mixed_precision_reduce": "float32"},
        "parallelism": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 8},
        "activation_checkpoint": None,
        "compile": {"enable": False, "components": ["model", "loss"]},
    }
    path = written(tmp_path, json.dumps(saved), "saved.json")
    file = read_torchtitan(path)
    assert (file.settings["training.micro_batch_size"], file.settings["strategy.replicate"]) == (4, 2)
    assert file.settings["training.activation_checkpointing"] == "none"
    assert of_kind(imported(path, model="llama-3-8b").strategy, Fsdp2Table).replicate == 2


@pytest.mark.parametrize(
    ("words", "compiles", "loss"),
    [
        ("--compile.enable", True, "fused"),
        ("--compile.enable --compile.components loss", False, "fused"),
        ("--compile.enable --compile.components model", True, "eager"),
        ("--training.seq_len=4096", False, "eager"),
    ],
)
def test_the_loss_is_fused_where_it_is_compiled(
    tmp_path: Path, words: str, *, compiles: bool, loss: str
) -> None:
    training = resolve(imported(f"{written(tmp_path, NEW)} {words}")).training
    assert (training.compile, training.cross_entropy) == (compiles, loss)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("--module llama3 --config llama3_8b --loss.num_chunks 16", NotSimulatedError, "simulate 16 chunks"),
        ("{} --loss.num_chunks 8", InputError, "before 0.3 computes the loss in one piece"),
        ("--module llama3 --config llama3_8b --loss.num_chunk 8", InputError, "did you mean 'num_chunks'"),
    ],
)
def test_another_number_of_chunks_is_refused(
    tmp_path: Path, config: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        imported(config.format(written(tmp_path, NEW)))


def test_eight_chunks_are_the_loss_of_0_3(tmp_path: Path) -> None:
    experiment = imported("--module llama3 --config llama3_8b --loss.num_chunks 8")
    assert resolve(experiment).training.cross_entropy == "torchtitan-chunked"
    saved = {"loss": {"num_chunks": 8, "loss_fn": {"global_vocab_size": 2}}, "training": {"seq_len": 4096}}
    notes = imported(written(tmp_path, json.dumps(saved), "saved.json"), model="llama-3-8b").notes
    assert not any("[loss]" in note for note in notes)


@pytest.mark.parametrize(("words", "is_compiled"), [("", False), (" --compile.enable", True)])
def test_a_job_of_0_3_is_written(words: str, *, is_compiled: bool) -> None:
    """0.2 reads the file, and has the loss in one piece."""
    job = resolve(imported(f"--module llama3 --config llama3_8b{words}"))
    file = WRITER.write(job)
    assert file is not None
    assert not file.reason
    assert f"[compile]\nenable = {str(is_compiled).lower()}\n" in file.text
    assert "components" not in file.text
    assert any("computes the loss in one piece" in note for note in file.notes)


def test_a_global_batch_is_accumulated(tmp_path: Path) -> None:
    """128 sequences on 16 GPUs with 2 at a time: 4 micro-batches."""
    config = f"{written(tmp_path, NEW)} --training.global_batch_size=128"
    assert imported(config).training.gradient_accumulation_steps == 4
    with pytest.raises(
        InputError, match="global batch of 100 sequences: expected a multiple of micro-batch 2 x 16"
    ):
        imported(f"{written(tmp_path, NEW)} --training.global_batch_size=100")


def test_replicas_and_shards_must_make_the_gpus(tmp_path: Path) -> None:
    degrees = "--parallelism.data_parallel_replicate_degree=2 --parallelism.data_parallel_shard_degree={}"
    path = written(tmp_path, NEW)
    assert of_kind(imported(f"{path} {degrees.format(8)}").strategy, Fsdp2Table).replicate == 2
    with pytest.raises(InputError, match="2 replicas of 4 shards are 8 GPUs, but the experiment has 16"):
        imported(f"{path} {degrees.format(4)}")


def test_shards_of_one_are_ddp_before_0_3(tmp_path: Path) -> None:
    text = NEW.replace("shard_degree = -1", "shard_degree = 1\ndata_parallel_replicate_degree = 16")
    strategy = of_kind(imported(written(tmp_path, text)).strategy, DdpTable)
    assert (strategy.kind, strategy.bucket_cap_mb) == ("ddp", 100.0)
    assert strategy.no_sync is False


def test_what_ddp_does_not_do_is_said(tmp_path: Path) -> None:
    """`replicate` has neither FSDP's types nor its resharding; autocast takes the type of parameters."""
    degrees = "--parallelism.data_parallel_replicate_degree=16 --parallelism.data_parallel_shard_degree=1"
    keys = (
        "--training.mixed_precision_param=bfloat16 --training.mixed_precision_reduce=float32 "
        "--parallelism.fsdp_reshard_after_forward=always --training.enable_cpu_offload=false"
    )
    path = written(tmp_path, NEW.replace("data_parallel_shard_degree = -1", ""))
    experiment = imported(f"{path} {degrees} {keys}")
    assert (experiment.strategy.kind, experiment.training.precision) == ("ddp", "bf16")
    notes = " ".join(experiment.notes)
    assert "mixed_precision_param: DDP's parameters are fp32, torch.autocast computes in it" in notes
    assert (
        "no effect with DDP (replicas of 1 shard): training.mixed_precision_reduce, "
        "training.enable_cpu_offload, parallelism.fsdp_reshard_after_forward" in notes
    )
    assert "DDP" not in " ".join(imported(f"{path} {keys}").notes)


def test_ddp_that_offloads_is_refused(tmp_path: Path) -> None:
    """torchtitan hands `enable_cpu_offload` to `fully_shard` only, and makes the model on the CPU."""
    text = NEW.replace("shard_degree = -1", "shard_degree = 1\ndata_parallel_replicate_degree = 16")
    with pytest.raises(InputError, match=r"enable_cpu_offload: found true with 16 replicas of 1 shard.*DDP"):
        imported(f"{written(tmp_path, text)} --training.enable_cpu_offload")


def test_float8_converters_train_in_fp8(tmp_path: Path) -> None:
    text = NEW.replace('flavor = "8B"', 'flavor = "8B"\nconverters = ["float8"]')
    experiment = imported(written(tmp_path, text + "\n[float8]\nenable_fsdp_float8_all_gather = true\n"))
    strategy = of_kind(experiment.strategy, Fsdp2Table)
    assert (experiment.training.precision, strategy.param_dtype) == ("fp8", "fp8")


@pytest.mark.parametrize(("dtype", "stored"), [("", "fp32"), ("float32", "fp32"), ("bfloat16", "bf16")])
def test_weights_are_kept_in_the_type_of_training(tmp_path: Path, dtype: str, stored: str) -> None:
    """Read, and written back."""
    line = f"{written(tmp_path, NEW)} --training.dtype={dtype}" if dtype else written(tmp_path, NEW)
    experiment = imported(line)
    assert experiment.training.stored_dtype == stored
    again = imported(written(tmp_path, torchtitan_toml(resolve(experiment)), "again.toml"))
    assert again.training.stored_dtype == stored


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("--activation_checkpoint.mode=memory_budget", "memory_budget"),
        ("--optimizer.name=Muon", "Muon"),
        ("--model.converters=quantize.grouped_mm.mx", "grouped_mm"),
        ("--optimizer.early_step_in_backward", "inside the backward"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(tmp_path: Path, change: str, what: str) -> None:
    with pytest.raises(NotSimulatedError, match=what):
        imported(f"{written(tmp_path, NEW)} {change}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--training.seq_lenn=4096", "did you mean 'seq_len'"),
        ("--trainin.seq_len=4096", "did you mean 'training'"),
        ("--training.seq_len=long", "expected a whole number"),
        ("--training.dtype=bf16", "expected one of float32, bfloat16"),
        ("--parallelism.fsdp_reshard_after_forward=sometimes", "expected one of default, always, never"),
        ("--parallelism.data_parallel_replicate_degree=0", "expected at least 1"),
        ("--activation_checkpoint.selective_ac_option=layers", "expected 'op' or a number"),
        ("--training.batch_size=4", "the old name of"),
        ("--module llama3 --config llama3_9b", "zsim knows --module llama3 --config llama3_8b"),
    ],
)
def test_mistakes_name_what_was_expected(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        imported(f"{written(tmp_path, NEW)} {change}")


def test_set_wins_over_the_file_and_the_experiment_may_not_contradict_it(tmp_path: Path) -> None:
    path = written(tmp_path, NEW)
    assert imported(path, training__micro_batch_size=1).training.micro_batch_size == 1
    data = {"cluster": "dgx-h100", "nodes": 2, "training": {"micro_batch_size": 1}}
    with pytest.raises(InputError, match=r"training.micro_batch_size: found 1, but .*train.toml says 2"):
        build_experiment(data, {"strategy.config": path}, origin="test")


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        (
            "local_batch_size = 0\nglobal_batch_size = 8",
            r"training\.local_batch_size: found 0, expected a whole number of at least 1",
        ),
        (
            "local_batch_size = 2\nglobal_batch_size = 0",
            r"training\.global_batch_size: found 0, expected at least 1, or -1",
        ),
    ],
)
def test_a_batch_of_nothing_is_refused(batches: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(NEW.replace("local_batch_size = 2", batches))
    data = {"model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 8}
    with pytest.raises(InputError, match=rf"mine\.toml: {said}"):
        build_experiment(data, {"strategy.config": str(path)}, origin="test")
