"""Bytes of parameters, gradients and optimizer states under ZeRO: the paper's formulas and DeepSpeed's own
estimators."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Bytes of one rank."""

    parameters: float
    gradients: float
    optimizer_states: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer_states


def model_state_bytes(
    numel: int,
    stage: int,
    data_parallel_size: int,
    *,
    parameter_bytes: int = 2,
    gradient_bytes: int = 2,
    optimizer_bytes: int = 12,
    is_padded: bool = False,
) -> ModelStates:
    """Model states of one rank.

        stage 0: (2 + 2 + K) P             stage 2: 2 P + (2 + K) P / N
        stage 1: (2 + 2) P + K P / N       stage 3: (2 + 2 + K) P / N

    P: `numel`; N: `data_parallel_size`; K: `optimizer_bytes` per parameter, 12 for mixed-precision Adam
    (fp32 master, momentum, variance). `is_padded`: shards are whole elements, ceil(P / N), as they are in
    memory; the paper divides exactly. Source: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 5 and
    Table 1.
    """
    assert stage in (0, 1, 2, 3), stage
    assert data_parallel_size > 0, data_parallel_size
    shard = ceil(numel / data_parallel_size) if is_padded else numel / data_parallel_size
    return ModelStates(
        parameters=parameter_bytes * (shard if stage >= 3 else numel),
        gradients=gradient_bytes * (shard if stage >= 2 else numel),
        optimizer_states=optimizer_bytes * (shard if stage >= 1 else numel),
    )


@dataclass(frozen=True, slots=True)
class DeepSpeedEstimate:
    """What DeepSpeed's `estimate_zero*_model_states_mem_needs` prints, in bytes per GPU and per node's CPU.

    No activations, no communication buckets, no reuse distance: an orientation, not a footprint.
    """

    gpu_bytes: int
    cpu_bytes: int


def deepspeed_zero2_estimate(
    numel: int,
    gpus_per_node: int,
    nodes: int = 1,
    *,
    offloads_optimizer: bool,
    buffer_factor: float = 1.5,
) -> DeepSpeedEstimate:
    """GPU 2 P + 18 P / N; with offload 2 P, and CPU P max(4 N, 16) * factor.

    P: parameters; N: GPUs. Source: DeepSpeed 0.19, `runtime/zero/stage_1_and_2.py`.
    """
    total_gpus = nodes * gpus_per_node
    if offloads_optimizer:
        return DeepSpeedEstimate(2 * numel, int(numel * max(4 * total_gpus, 16) * buffer_factor))
    gpu_bytes = 2 * numel + int(18 * numel / total_gpus)
    return DeepSpeedEstimate(gpu_bytes, int(numel * 4 * gpus_per_node * buffer_factor))


def deepspeed_zero3_estimate(
    numel: int,
    largest_layer_numel: int,
    gpus_per_node: int,
    nodes: int = 1,
    *,
    offloads_optimizer: bool,
    offloads_parameters: bool = False,
    uses_zero_init: bool = True,
    buffer_factor: float = 1.5,
) -> DeepSpeedEstimate:
    """GPU 4 L + 18 P / N; with optimizer offload 4 L + 2 P / N, with parameters too 4 L.

    P: parameters; L: those of the largest layer; N: GPUs. CPU: 16 P or (with parameters) 18 P over the nodes,
    times the factor; without `zero.Init` at least 4 P per GPU, while the model is being built.
    Source: DeepSpeed 0.19, `runtime/zero/stage3.py`.
    """
    total_gpus = nodes * gpus_per_node
    gpu_bytes = 4 * largest_layer_numel
    building = 4 * gpus_per_node
    if not offloads_optimizer:
        built = largest_layer_numel if uses_zero_init else numel
        cpu_bytes = int(built * building * buffer_factor)
        return DeepSpeedEstimate(gpu_bytes + int(18 * numel / total_gpus), cpu_bytes)
    if not offloads_parameters:
        gpu_bytes += int(2 * numel / total_gpus)
    per_parameter = (18 if offloads_parameters else 16) / nodes
    if not uses_zero_init:
        per_parameter = max(building, per_parameter)
    return DeepSpeedEstimate(gpu_bytes, int(numel * per_parameter * buffer_factor))
