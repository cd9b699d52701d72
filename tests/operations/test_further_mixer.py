"""A recurrence in attention's place, as a person would add one: a class, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from zsim.cost.kernels.kernel import elementwise, gemm
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.engine.simulate import simulate_job
from zsim.explain.report_of import report_of
from zsim.operations import FORWARD, Module, Operation
from zsim.operations.operation import Kernels, Role
from zsim.operations.sharding import FeatureCut
from zsim.operations.tensors import Sizes
from zsim.plan.make import plan_basis, stages_of
from zsim.plan.workload.workload import ModuleCall, make_workload
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024, "tie_word_embeddings": False,
}  # fmt: skip
STATE = 16


@dataclass(frozen=True, slots=True)
class Recurrence(Operation):
    """A linear recurrence of `width` channels with a state of 16 numbers each, in chunks of the sequence."""

    width: int

    @property
    def role(self) -> Role:
        return Role.MIXER

    def cut_features(self, cut: FeatureCut) -> Recurrence:
        return replace(self, width=cut.features(self.width))

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        e, dtype = options.activation_bytes, options.kernel_dtype
        scan = elementwise(2 * shape.tokens * self.width * e, dtype)
        return (gemm(shape.tokens, self.width, STATE, e, dtype), scan)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        return self.forward_kernels(module, shape, options) * 2

    def forward_flops(self, module: Module, sequence_length: int) -> float:
        return 2.0 * STATE * self.width

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return 3 * self._bytes(shape, options)

    def selective_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self._bytes(shape, options)

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self._bytes(shape, options)

    def kept_outputs(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        return (self._bytes(shape, options),)

    def _bytes(self, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * self.width * options.activation_bytes


def job_of(strategy: dict[str, Any], tensor: int = 1, **training: Any) -> Job:
    """A job of 8 GPUs on a tiny Llama whose attention is a recurrence of 256 channels."""
    experiment = {
        "model": TINY, "cluster": "dgx-h100", "gpus": 8, "strategy": strategy,
        "training": {"sequence_length": 512, **training},
        **({"parallelism": {"tensor": tensor}} if tensor > 1 else {}),
    }  # fmt: skip
    job = resolve(Experiment.model_validate(experiment))
    return replace(
        job,
        model=job.model.map_blocks(
            lambda block: replace(
                block,
                modules=tuple(
                    replace(module, op_spec=Recurrence(256)) if module.role is Role.MIXER else module
                    for module in block.modules
                ),
            )
        ),
    )


def mixer_of(job: Job) -> ModuleCall:
    (stage,) = stages_of(job.model, plan_basis(job).parallelism)
    calls = make_workload(stage, job.training).segments[1].calls
    return next(call for call in calls if call.module.role is Role.MIXER)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "ddp"},
        {"kind": "fsdp1"},
        {"kind": "fsdp2"},
        {"kind": "deepspeed", "stage": 3},
        {"kind": "megatron"},
    ],
    ids=lambda strategy: strategy["kind"],
)
def test_frameworks_train_it(strategy: dict[str, Any], checkpointing: str) -> None:
    job = job_of(strategy, activation_checkpointing=checkpointing)
    report = report_of(simulate_job(job), 0.0)
    assert report.step_seconds > 0


def test_compiled_blocks_that_keep_outputs_train_it() -> None:
    job = job_of(
        {"kind": "fsdp2", "wrapping": "torchtitan"}, compile=True, activation_checkpointing="selective-op"
    )
    output = 512 * 256 * 2
    assert mixer_of(job).work.kept_outputs == (output,)
    assert report_of(simulate_job(job), 0.0).step_seconds > 0


@pytest.mark.parametrize("strategy", [{"kind": "megatron"}, {"kind": "fsdp2", "wrapping": "torchtitan"}])
def test_tensor_parallel_ranks_have_a_part_of_its_channels(strategy: dict[str, Any]) -> None:
    """128 of 256 channels on each of two ranks, so half of the product's FLOPs."""
    whole, part = job_of(strategy), job_of(strategy, 2)
    call = mixer_of(part)
    assert call.module.op_spec == Recurrence(128)
    flops = [
        mixer_of(job).module.kernels(FORWARD, BatchShape(1, 512), WorkOptions())[0].flops
        for job in (whole, part)
    ]
    assert flops == [2 * 512 * 256 * STATE, 2 * 512 * 128 * STATE]
    assert report_of(simulate_job(part), 0.0).step_seconds > 0


def test_selective_recomputation_runs_it_again() -> None:
    """Three tensors of 512 x 256 in bf16 without, one with it."""
    tensor_bytes = 512 * 256 * 2
    none, selective = (
        mixer_of(job_of({"kind": "ddp"}, activation_checkpointing=policy)).work
        for policy in ("none", "selective")
    )
    assert none.saved_bytes == 3 * tensor_bytes
    assert selective.saved_bytes == tensor_bytes
    assert selective.recompute == selective.forward
