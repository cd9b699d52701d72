"""The script that starts Megatron as a job is simulated: read back, it is the same job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.export import export_files

CASES: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "the distributed optimizer": {
        "strategy": {
            "distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "average_in_collective": True,
            "bucket_size": 10_000_000,
        }
    },
    "instances": {"strategy": {"distributed_optimizer": True, "optimizer_instances": 2}},
    "Megatron-FSDP": {
        "strategy": {
            "distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "fsdp_sharding": "optim_grads_params",
            "optimizer_instances": 2,
            "fsdp_outer_sharding": "optim",
            "fsdp_unit_size": 300_000_000,
            "fsdp_double_buffer": True,
            "gradient_reduce_div_fusion": False,
            "keep_fp8_transpose_cache": True,
        }
    },
    "Megatron-FSDP beside tensor ranks": {
        "parallelism": {"tensor": 2, "sequence_parallel": True},
        "strategy": {
            "distributed_optimizer": True,
            "fsdp_sharding": "optim_grads",
            "fsdp_gather_group": True,
            "grad_reduce_dtype": "bf16",
        },
    },
    "states in fewer bits": {
        "strategy": {
            "distributed_optimizer": True,
            "precision_aware_optimizer": True,
            "main_grads_dtype": "bf16",
            "grad_reduce_dtype": "bf16",
            "main_params_dtype": "fp16",
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "fp8",
        }
    },
    "gradients in bf16": {"strategy": {"grad_reduce_dtype": "bf16", "gradient_accumulation_fusion": False}},
    "fp16": {"training": {"precision": "fp16"}, "strategy": {"grad_reduce_dtype": "fp32"}},
    "gradients in fp16": {"training": {"precision": "fp16"}, "strategy": {"grad_reduce_dtype": "fp16"}},
    "fp8": {"training": {"precision": "fp8"}},
    "fp32": {"training": {"precision": "fp32", "attention": "math", "gradient_clipping": 0.0}},
    "one graph": {"strategy": {"cuda_graph": True, "check_for_nan": False}},
    "predictions": {"strategy": {"mtp_layers": 2}},
    "graphs of layers": {"strategy": {"cuda_graph_modules": ["attn", "mlp"]}},
    "tensor": {"parallelism": {"tensor": 4}},
    "sequence": {"parallelism": {"tensor": 8, "sequence_parallel": True, "async_tensor": True}},
    "pipeline": {"parallelism": {"pipeline": 4}, "training": {"gradient_accumulation_steps": 8}},
    "interleaved": {
        "parallelism": {"pipeline": 4, "virtual_stages": 2},
        "training": {"gradient_accumulation_steps": 8, "device_max_connections": 1},
    },
    "messages of its own": {
        "parallelism": {"pipeline": 4, "virtual_stages": 2},
        "training": {"gradient_accumulation_steps": 16},
        "strategy": {
            "overlap_grad_reduce": True,
            "align_grad_reduce": False,
            "overlap_p2p_warmup_flush": True,
            "micro_batch_group": 8,
        },
    },
    "no overlap of messages": {
        "parallelism": {"pipeline": 4, "virtual_stages": 2},
        "training": {"gradient_accumulation_steps": 8},
        "strategy": {"overlap_p2p": False, "align_param_gather": False, "timing_log_level": 2},
    },
    "tests in layers": {
        "strategy": {"test_mode": True},
    },
    "uneven": {
        "parallelism": {"pipeline": 4, "layers_per_stage": [7, 9, 9, 7]},
        "training": {"gradient_accumulation_steps": 8},
    },
    "a layer less": {
        "parallelism": {"pipeline": 3, "tensor": 2, "last_stage_less_layers": 1},
        "training": {"gradient_accumulation_steps": 6},
        "nodes": 3,
    },
    "an embedding and a head alone": {
        "parallelism": {
            "pipeline": 2, "virtual_stages": 17, "first_stage_less_layers": 1, "last_stage_less_layers": 1,
        },
        "training": {"gradient_accumulation_steps": 8},
    },
    "stages without layers": {
        "parallelism": {"pipeline": 4, "layers_per_stage": [0, 16, 0, 16]},
        "training": {"gradient_accumulation_steps": 8},
    },
    "context": {"parallelism": {"context": 2, "context_method": "all-to-all"}},
    "context of two levels": {"parallelism": {"context": 16, "context_method": "a2a+p2p"}},
    "deterministic": {"strategy": {"deterministic_mode": True}},
    "Megatron's own modules": {
        "strategy": {"transformer_impl": "local"}, "training": {"attention": "math"},
    },
    "all three": {
        "parallelism": {
            "tensor": 2, "sequence_parallel": True, "pipeline": 2, "context": 2, "order": "tp-cp-pp-dp",
        },
        "training": {"gradient_accumulation_steps": 4},
    },
    "every block": {"training": {"activation_checkpointing": "full"}},
    "some blocks": {
        "training": {
            "activation_checkpointing": "full", "recompute_method": "block", "recompute_layers": 2,
        }
    },
    "the core of attention": {"training": {"activation_checkpointing": "selective", "attention": "math"}},
    "a fused loss": {"training": {"cross_entropy": "fused", "expandable_segments": True}},
    "sgd": {"training": {"optimizer": "sgd"}},
    "muon": {"training": {"optimizer": "muon"}},
    "muon of owners": {
        "training": {"optimizer": "muon"},
        "strategy": {
            "layer_wise_optimizer": True, "muon_tp_mode": "duplicated", "muon_num_ns_steps": 10,
            "muon_fp32_matmul_prec": "high", "muon_nesterov": True, "muon_split_qkv": False,
        },
        "parallelism": {"tensor": 2},
    },
    "another vocabulary": {"strategy": {"vocabulary_multiple": 64}, "parallelism": {"tensor": 2}},
}  # fmt: skip


def job_of(model: str | dict[str, Any], case: dict[str, Any]) -> Job:
    strategy = {"kind": "megatron", **case.get("strategy", {})}
    data = {"model": model, "cluster": "dgx-h100", "nodes": 2, **case, "strategy": strategy}
    return resolve(zsim.Experiment(**data))


def back(job: Job, folder: Path) -> Job:
    """The job of the script that is written, where the cluster alone is given beside it."""
    path = folder / "megatron.sh"
    path.write_text(export_files(job).files["megatron.sh"])
    return resolve(build_experiment({"cluster": "dgx-h100"}, {"strategy.config": str(path)}, origin="test"))


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    """Liger and torch.compile have no flags; Megatron's kernels are what both stand for."""
    job = job_of("llama-3-8b", CASES[name])
    found = back(job, tmp_path)
    assert found.parallelism == job.parallelism
    assert found.training == job.training
    assert found.strategy == job.strategy
    assert (found.world_size, found.model.vocab_size) == (job.world_size, job.model.vocab_size)


@pytest.mark.parametrize(
    "model",
    [
        "llama-3-8b",
        "gpt2",
        "qwen3-8b",
        "qwen2-7b",
        "mistral-7b",
        "gpt-3-6.7b",
        "phi3-mini",
        "nemotron-4-340b",
    ],
)
def test_every_part_of_a_network_is_written(model: str, tmp_path: Path) -> None:
    """Megatron has no more positions than asked for; the rest is the same to the parameter."""
    job = job_of(model, {"training": {"sequence_length": 1024}})
    found = back(job, tmp_path)
    assert found.model.numel == job.model.numel
    assert len(found.model.blocks) == len(job.model.blocks)
    assert (found.model.is_tied, found.model.vocab_size) == (job.model.is_tied, job.model.vocab_size)


@pytest.mark.parametrize(
    ("model", "case", "why"),
    [
        ("llama-3-8b", {"strategy": {"engine": "nanotron"}}, "has a file of its own"),
        ("llama-3-8b", {"strategy": {"version": "3.0"}}, "has other flags than Core"),
        ("llama-3-8b", {"training": {"cross_entropy": "eager"}}, "no cross entropy 'eager'"),
        (
            "llama-3-8b",
            {"training": {"activation_checkpointing": "full", "checkpoint_every": 2}},
            "checkpoints every layer",
        ),
        ("llama-3-8b", {"parallelism": {"tensor": 2, "order": "cp-tp-dp-pp"}}, "its mesh has the orders"),
        ("gemma2-9b", {}, "all alike"),
        ("falcon-7b", {}, "two norms in a layer"),
        ("gpt-neo-2.7b", {}, "all alike"),
        ("bloom-7b1", {}, "no norm behind the embedding"),
        ("opt-6.7b", {}, "no activation 'relu'"),
    ],
)
def test_what_megatron_cannot_be_told_is_said(model: str, case: dict[str, Any], why: str) -> None:
    assert why in export_files(job_of(model, case)).missing["megatron.sh"]


def test_the_numbers_of_a_script_are_literal() -> None:
    """64 sequences: 2 x 8 micro-batches on 4 replicas; NullTokenizer adds one entry to 128,255."""
    case = {
        "parallelism": {"tensor": 2, "pipeline": 2},
        "training": {"micro_batch_size": 2, "gradient_accumulation_steps": 8, "sequence_length": 4096},
    }
    text = export_files(job_of("llama-3-8b", case)).files["megatron.sh"]
    for flag in (
        "--global-batch-size 64", "--micro-batch-size 2", "--vocab-size 128255", "--num-query-groups 8",
        "--nproc_per_node 8", "--nnodes 2", "--swiglu", "--disable-bias-linear", "--clip-grad 1",
    ):  # fmt: skip
        assert flag in text


def test_other_strategies_have_no_such_script() -> None:
    job = resolve(zsim.Experiment(model="llama-3-8b", cluster="dgx-h100", strategy={"kind": "fsdp2"}))
    exported = export_files(job)
    assert "megatron.sh" not in {**exported.files, **exported.missing}
