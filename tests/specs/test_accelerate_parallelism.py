"""Accelerate's sizes of parallelism, and its Megatron plugin, as `[parallelism]`."""

from __future__ import annotations

from pathlib import Path

import pytest

import zsim
from tests.expect import of_kind
from zsim.errors import InputError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp2.settings import Fsdp2Config, Fsdp2Table
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.export import export_files

FSDP = """
distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""
DEEPSPEED = """
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config:
  zero_stage: 3
"""
MEGATRON = {
    "tp_degree": "2",
    "pp_degree": "2",
    "num_micro_batches": "8",
    "sequence_parallelism": "true",
    "use_distributed_optimizer": "true",
    "gradient_clipping": "0.5",
    "context_parallel_size": "1",
    "recompute_granularity": "full",
}


def job_of(text: str, folder: Path, **sizes: object) -> Job:
    """Llama 3 8B on 16 GPUs, with the sizes in `parallelism_config`."""
    path = folder / "accelerate.yaml"
    keys = "".join(f"  parallelism_config_{key}: {value}\n" for key, value in sizes.items())
    path.write_text(text + (f"parallelism_config:\n{keys}" if keys else ""))
    data = {"model": "llama-3-8b", "cluster": "dgx-h100", "nodes": 2}
    return resolve(build_experiment(data, {"strategy.config": str(path)}, origin="test"))


def megatron(folder: Path, **changes: str) -> Job:
    keys = {**MEGATRON, **changes}
    text = "".join(f"  megatron_lm_{key}: {value}\n" for key, value in keys.items() if value)
    head = "distributed_type: MEGATRON_LM\nmixed_precision: bf16\nmegatron_lm_config:\n"
    return job_of(head + text, folder)


def test_fsdp2_splits_layers_and_sequences(tmp_path: Path) -> None:
    """2 x 2 x 2 x 2 = 16 ranks: replicas, shards, context and tensor."""
    job = job_of(
        FSDP,
        tmp_path,
        dp_replicate_size=2,
        dp_shard_size=2,
        tp_size=2,
        cp_size=2,
        cp_comm_strategy="alltoall",
    )
    parallelism = job.parallelism
    assert (parallelism.tensor, parallelism.context, job.data_parallel_size) == (2, 2, 4)
    assert (parallelism.sequence_parallel, parallelism.context_method) == (False, "p2p")
    assert of_kind(job.experiment.strategy, Fsdp2Table).replicate == 2
    assert any("tp_size: simulated as torchtitan splits layers" in note for note in job.notes)


@pytest.mark.parametrize(
    "parallelism",
    [
        {"tensor": 2, "sequence_parallel": False},
        {"context": 4},
        {"tensor": 2, "sequence_parallel": False, "context": 2, "context_method": "p2p"},
    ],
)
@pytest.mark.parametrize("replicate", [1, 2])
def test_what_is_written_is_read_back(tmp_path: Path, parallelism: dict[str, object], replicate: int) -> None:
    experiment = zsim.Experiment(
        model="llama-3-8b",
        cluster="dgx-h100",
        nodes=2,
        strategy={"kind": "fsdp2", "reduce_dtype": "bf16", "replicate": replicate, "no_sync": True},
        parallelism=parallelism,
    )
    job = resolve(experiment)
    back = job_of(export_files(job).files["accelerate.yaml"], tmp_path)
    assert (back.parallelism, back.data_parallel_size) == (job.parallelism, job.data_parallel_size)
    assert of_kind(back.strategy, Fsdp2Config).replicate == replicate


@pytest.mark.parametrize(
    ("parallelism", "why"),
    [
        ({"pipeline": 2}, "no pipeline"),
        ({"tensor": 2}, "without sequence parallelism"),
        ({"tensor": 16, "sequence_parallel": False}, "ranks that shard beside"),
        ({"context": 2, "context_method": "all-to-all"}, "and exchanges no heads"),
    ],
)
def test_what_accelerate_cannot_be_told_is_said(parallelism: dict[str, object], why: str) -> None:
    experiment = zsim.Experiment(
        model="gpt-neox-20b" if "tensor" in parallelism else "llama-3-8b",
        cluster="dgx-h100",
        nodes=2,
        strategy={"kind": "fsdp2", "reduce_dtype": "bf16", "no_sync": True},
        parallelism=parallelism,
    )
    assert why in export_files(resolve(experiment)).missing["accelerate.yaml"]


def test_deepspeed_splits_sequences(tmp_path: Path) -> None:
    job = job_of(DEEPSPEED, tmp_path, sp_size=4)
    assert (job.parallelism.context, job.parallelism.context_method) == (4, "all-to-all")
    assert (of_kind(job.strategy, DeepSpeedConfig).stage, job.data_parallel_size) == (3, 4)


@pytest.mark.parametrize(
    ("text", "sizes", "message"),
    [
        (FSDP, {"dp_shard_size": 8, "tp_size": 4}, "1 replicas of 8 shards, tensor 4 are 32 GPUs"),
        (FSDP, {"dp_shard_size": 16, "sp_size": 2}, "expected distributed_type DEEPSPEED, or .*cp_size 2"),
        (
            FSDP,
            {"dp_shard_size": 8, "cp_size": 2, "cp_comm_strategy": "ring"},
            "expected allgather or alltoall",
        ),
        (FSDP, {"dp_shard_size": 8, "cp_size": 0}, "cp_size: found 0, expected at least 1"),
        (FSDP, {"tp_size": 16}, "leaves FSDP no ranks"),
        (DEEPSPEED, {"tp_size": 2}, "expected tensor_parallel.autotp_size in the JSON"),
        (DEEPSPEED, {"cp_size": 2}, "expected parallelism_config_sp_size"),
    ],
)
def test_what_accelerate_refuses_is_refused(
    tmp_path: Path, text: str, sizes: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        job_of(text, tmp_path, **sizes)


def test_its_megatron_plugin_is_megatron(tmp_path: Path) -> None:
    """Every layer recomputed one by one, as the plugin takes "full"."""
    job = megatron(tmp_path)
    table = of_kind(job.experiment.strategy, MegatronTable)
    assert (job.parallelism.tensor, job.parallelism.pipeline, job.data_parallel_size) == (2, 2, 4)
    assert (job.parallelism.sequence_parallel, table.distributed_optimizer) == (True, True)
    assert (job.training.gradient_accumulation_steps, job.training.gradient_clipping) == (8, 0.5)
    assert (job.training.precision, job.training.activation_checkpointing) == ("bf16", "full")
    assert job.training.attention == "flash"


def test_the_last_stage_may_have_its_own_number_of_layers(tmp_path: Path) -> None:
    job = megatron(tmp_path, decoder_last_pipeline_num_layers="12")
    assert job.parallelism.layers_per_stage == (20, 12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_parallel_size": ""}, "Accelerate takes 2 ranks for every sequence"),
        ({"recompute_granularity": ""}, "takes recomputation of every layer"),
        ({"tp_degre": "2"}, "unknown key 'megatron_lm_tp_degre'; did you mean 'tp_degree'"),
        ({"sequence_parallelism": "maybe"}, "found 'maybe', expected true or false"),
        ({"num_micro_batches": "few"}, "found 'few', expected a whole number"),
        ({"tp_degree": "many"}, "found 'many', expected a whole number"),
    ],
)
def test_keys_of_the_plugin_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        megatron(tmp_path, **changes)


def test_its_own_fsdp_is_read(tmp_path: Path) -> None:
    """`use_custom_fsdp` is Megatron-FSDP, whose sharding is none by default, which reduces nothing without
    overlap."""
    with pytest.raises(InputError, match="found 'no_shard' without overlap_grad_reduce"):
        megatron(tmp_path, use_custom_fsdp="true")
