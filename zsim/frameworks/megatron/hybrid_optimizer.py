"""Megatron's hybrid optimizer, which updates a fraction of a rank's tensors on the CPU.

# [Note: an optimizer on the CPU]
With `--optimizer-cpu-offload` fp32 masters and moments are in host memory. Transcribed from
`HybridDeviceOptimizer` of Megatron-Core 0.16.1 core/optimizer/cpu_offloading/hybrid_optimizer.py, as
core/optimizer/__init__.py makes it.

# [Note: the fraction]
Tensors go to the CPU in the optimizer's order until they have that fraction of the rank's elements, the last
one whole. The others have fp32 masters and moments on the GPU, whatever types the precision-aware optimizer
was asked for.

# [Note: the step on two devices]
Gradients are copied to pinned host memory in fp32, cast on the GPU where the buffer has 16 bits (torch casts
a non-blocking copy on the GPU, 2.13 ATen/native/cuda/Copy.cu). The GPU updates its own tensors. Then each
optimizer of the CPU waits for its gradients, updates, and copies its masters back, which the GPU casts to the
model's type. Without `--overlap-cpu-optimizer-d2h-h2d` there is one optimizer of the CPU, on the compute
stream. With it there is one for every tensor, and copies have streams of their own, so that a tensor is
updated while others are on their way.

# [Note: masters that are not pinned]
`--pin-cpu-params` is on by default, but the fp32 copy that it is for is made of a pinned 16-bit one, and is
not pinned itself. Its copies to the GPU hold the host (up to core 0.19; pull request 4547 mends it).
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.kernels.update import cast_kernels
from zsim.cost.optimizers import UpdatedTensor
from zsim.frameworks.megatron.optimizer_step import prepare_gradients
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Memory
from zsim.plan.shared.host_side import HostSide
from zsim.plan.shared.optimizer import UPDATE, update
from zsim.specs.strategy.training import TrainingConfig

_D2H, _H2D = "gradients to host", "masters from host"
_STATES = 3  # fp32: the master and two moments


def split_tensors(numels: Sequence[int], fraction: float) -> tuple[list[int], list[int]]:
    """The tensors that the CPU updates, and those that the GPU does. See [Note: the fraction]."""
    threshold, offloaded = sum(numels) * fraction, 0
    on_cpu: list[int] = []
    for numel in numels:
        if offloaded >= threshold:
            break
        on_cpu.append(numel)
        offloaded += numel
    return on_cpu, list(numels[len(on_cpu) :])


def hybrid_states(strategy: MegatronConfig, numels: Sequence[int]) -> list[Memory]:
    """The states of a rank's tensors on both devices. Gradients in fp32 stay in pinned host memory, and where
    the buffer has 16 bits on the GPU.
    """
    assert strategy.offload is not None
    on_cpu, on_gpu = (sum(part) for part in split_tensors(numels, strategy.offload.fraction))
    copies = 0 if strategy.grad_dtype == "fp32" else 4 * on_gpu
    return [
        Memory("optimizer_states", 4 * _STATES * on_cpu, "host"),
        Memory("gradients", 4 * on_cpu, "host", is_pinned=True),
        Memory("optimizer_states", 4 * _STATES * on_gpu),
        Memory("gradients", copies),
    ]


def update_on_two_devices(
    builder: PlanBuilder,
    strategy: MegatronConfig,
    training: TrainingConfig,
    numels: Sequence[int],
    groups: Sequence[str],
) -> None:
    """Issue the update of this rank's elements of each tensor. See [Note: the step on two devices]."""
    prepare_gradients(builder, strategy, training, [numels], groups)
    if strategy.skips_update:
        return
    assert strategy.offload is not None
    on_cpu, on_gpu = split_tensors(numels, strategy.offload.fraction)
    host, overlaps = HostSide(builder), strategy.offload.overlaps
    d2h, h2d = (_D2H, _H2D) if overlaps else (COMPUTE, COMPUTE)
    builder.wait_stream(d2h, COMPUTE)
    if strategy.grad_dtype != "fp32" and on_gpu:
        casts = cast_kernels(sum(on_gpu), strategy.grad_dtype, "fp32")
        builder.kernels("cast gradients to fp32", casts, stream=d2h)
    batches = [[numel] for numel in on_cpu] if overlaps else [on_cpu] if on_cpu else []
    arrivals = [_send_gradients(builder, host, strategy, batch, d2h) for batch in batches]
    if on_gpu:
        update(
            builder, training, UpdatedTensor.flat(on_gpu), gradient_dtype="fp32", state_dtype="fp32",
            low_precision_copy=True,
        )  # fmt: skip
    for number, (batch, arrival) in enumerate(zip(batches, arrivals, strict=True)):
        numel, label = sum(batch), f"{UPDATE} {number} on the CPU" if overlaps else f"{UPDATE} on the CPU"
        builder.host_wait(arrival)
        host.optimizer(label, numel, training.optimizer, "fused")
        _bring_masters(builder, host, strategy, numel, h2d)


def _send_gradients(
    builder: PlanBuilder, host: HostSide, strategy: MegatronConfig, numels: Sequence[int], stream: str
) -> int | None:
    """Copy the gradients of an optimizer of the CPU to it, and return the event of the last copy."""
    numel = sum(numels)
    cast = 4 * numel if strategy.grad_dtype != "fp32" else 0
    builder.allocate("buffers", cast, owner=_D2H)
    if cast:
        builder.kernels("cast gradients", cast_kernels(numel, strategy.grad_dtype, "fp32"), stream=stream)
    event = host.copy("gradients to host", "d2h", 4 * numel, stream)
    builder.free("buffers", cast, owner=_D2H)
    return event


def _bring_masters(
    builder: PlanBuilder, host: HostSide, strategy: MegatronConfig, numel: int, stream: str
) -> None:
    """Copy updated masters to the GPU, and cast them into the model's weights. Computation waits for it."""
    builder.wait_stream(stream, COMPUTE)
    is_low = strategy.param_dtype != "fp32"
    builder.allocate("buffers", 4 * numel if is_low else 0, owner=_H2D)
    host.copy("masters from host", "h2d", 4 * numel, stream, is_pinned=False)
    if is_low:
        kernels = cast_kernels(numel, "fp32", strategy.param_dtype)
        builder.kernels("cast masters", kernels, stream=stream)
    builder.free("buffers", 4 * numel if is_low else 0, owner=_H2D)
    builder.stream_wait(COMPUTE, builder.record(stream))
