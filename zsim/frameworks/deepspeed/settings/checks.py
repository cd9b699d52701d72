"""Configurations that DeepSpeed refuses, rejected before a GPU is rented. Each check mirrors one of its
assertions.
"""

from __future__ import annotations

from zsim.errors import InputError, did_you_mean
from zsim.frameworks.deepspeed.settings.config import Dtype, OptimizerWrapper, ZeroConfig
from zsim.frameworks.deepspeed.settings.one_bit import ONE_BIT_OPTIMIZERS
from zsim.frameworks.deepspeed.settings.reader import Reading
from zsim.frameworks.deepspeed.settings.release import Release
from zsim.frameworks.deepspeed.settings.schema import Bf16Block, DataTypesBlock, Fp16Block

DEEPSPEED_OPTIMIZERS = ("adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon")
TORCH_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip


def check_zero(reading: Reading, zero: ZeroConfig, release: Release) -> None:
    """Checks of `zero_optimization` by itself."""
    where = f"{reading.where}: zero_optimization"
    block = reading.zero
    if block.legacy_stage1 and zero.stage in (1, 2, 3):
        raise InputError(f"{where}.legacy_stage1: the old stage 1 left DeepSpeed with 0.5.9; expected false")
    if zero.reduce_bucket_size == 0 and release.requires_positive_reduce_bucket:
        raise InputError(f"{where}.reduce_bucket_size: found 0, expected at least 1 element")
    if zero.stage in (1, 2) and zero.allgather_bucket_size % 2:
        raise InputError(
            f"{where}.allgather_bucket_size: found {zero.allgather_bucket_size}, expected an even number"
        )
    _check_reduction(reading, zero)
    _check_offload(where, reading, zero)


def check_first_releases(
    reading: Reading, zero: ZeroConfig, param: Dtype, accumulate: Dtype, release: Release
) -> None:
    """Checks of what releases before 0.10.1 do not know, or do in a way that is not simulated."""
    is_bf16_optimizer = zero.stage == 1 and (param, accumulate) == ("bf16", "fp32")
    if zero.stage and accumulate != param and not (release.accumulates_in_another_dtype or is_bf16_optimizer):
        raise InputError(
            f"{reading.where}: data_types.grad_accum_dtype: found '{accumulate}' with ZeRO and {param}, "
            f"which DeepSpeed {release} refuses; expected '{param}', or strategy.version from '0.10.1' on"
        )
    offload = reading.zero.offload_optimizer
    is_offloaded = offload is not None and offload.device == "cpu"
    if release.copies_fp16_in_cpu_adam and param == "fp16" and zero.stage in (1, 2) and is_offloaded:
        raise InputError(
            f"{reading.where}: zero_optimization.offload_optimizer: DeepSpeed {release} copies fp16 weights "
            "to the GPU from within its CPU Adam, which is not simulated; expected strategy.version from "
            "'0.9.0' on, bf16, or stage 3"
        )


def _check_reduction(reading: Reading, zero: ZeroConfig) -> None:
    where, file = reading.where, reading.file
    if zero.stage in (2, 3) and zero.reduce_scatter:
        if file.gradient_predivide_factor != 1.0:
            raise InputError(
                f"{where}: gradient_predivide_factor: found {file.gradient_predivide_factor:g}, expected 1.0 "
                f"at stage {zero.stage} with zero_optimization.reduce_scatter"
            )
        if file.prescale_gradients:
            raise InputError(
                f"{where}: prescale_gradients: found true, expected false at stage {zero.stage} with "
                "zero_optimization.reduce_scatter"
            )
    if file.gradient_allreduce_op == "sum" and (zero.stage == 3 or zero.zenflow is not None):
        with_what = "stage 3" if zero.stage == 3 else "zenflow"
        raise InputError(f"{where}: gradient_allreduce_op: found 'sum', expected 'mean' with {with_what}")


def _check_offload(where: str, reading: Reading, zero: ZeroConfig) -> None:
    block = reading.zero.offload_optimizer
    if block is not None and block.ratio < 1 and zero.stage != 3:
        raise InputError(
            f"{where}.offload_optimizer.ratio: found {block.ratio:g} at stage {zero.stage}, expected 1.0; "
            "only stage 3 offloads a part"
        )
    for name in ("offload_param", "offload_optimizer"):
        offload = getattr(reading.zero, name)
        if offload is not None and offload.device == "nvme" and zero.stage == 3 and not offload.nvme_path:
            raise InputError(f"{where}.{name}.nvme_path: missing; device 'nvme' needs the path of a folder")


def check_gradient_norm(
    reading: Reading, zero: ZeroConfig, gradient_clipping: float, wrapper: OptimizerWrapper
) -> None:
    """Raises InputError for `compute_grad_norm: false` (since 0.19.7) with clipping, offload or
    BF16_Optimizer, which need the norm."""
    if zero.compute_grad_norm:
        return
    where = f"{reading.where}: zero_optimization.compute_grad_norm: false"
    if zero.stage not in (1, 2):
        raise InputError(f"{where} is for stages 1 and 2; the stage is {zero.stage}")
    if gradient_clipping > 0:
        raise InputError(f"{where} needs gradient_clipping 0, which is {gradient_clipping:g}")
    if zero.offload_optimizer is not None or zero.zenflow is not None:
        raise InputError(f"{where} does not go with optimizer offload or zenflow")
    if wrapper == "bf16_optimizer":
        raise InputError(f"{where} does not go with bf16 weights and fp32 accumulation at stage 1")


def check_precision_blocks(reading: Reading, zero: ZeroConfig, param: Dtype, release: Release) -> None:
    """Checks of low-precision master weights and of `data_types.param_dtype`."""
    where, file = reading.where, reading.file
    bf16, fp16 = file.bf16 or Bf16Block.model_construct(), file.fp16 or Fp16Block.model_construct()
    param_dtype = (file.data_types or DataTypesBlock.model_construct()).param_dtype
    if param_dtype is not None and param_dtype != param:
        raise InputError(
            f"{where}: data_types.param_dtype: found {param_dtype}, expected {param}, as trained in"
        )
    is_offloaded = zero.offload_optimizer is not None
    master_bf16, master_fp16 = bf16.bf16_master_weights_and_grads, fp16.fp16_master_weights_and_grads
    if bf16.bf16_optimizer_states and not master_bf16:
        raise InputError(f"{where}: bf16.bf16_optimizer_states: needs bf16.bf16_master_weights_and_grads")
    if master_bf16 and master_fp16:
        raise InputError(
            f"{where}: bf16.bf16_master_weights_and_grads: excludes fp16.fp16_master_weights_and_grads"
        )
    for key, is_on in (
        ("bf16.bf16_master_weights_and_grads", master_bf16),
        ("fp16.fp16_master_weights_and_grads", master_fp16),
    ):
        if is_on and zero.stage == 0:
            raise InputError(f"{where}: {key}: found true at stage 0, expected stage 1, 2 or 3")
        if is_on and not release.has_bf16_masters and (master_bf16 or zero.stage != 2):
            raise InputError(
                f"{where}: {key}: found true at stage {zero.stage} with DeepSpeed {release}; expected "
                f"{'[strategy]' if master_bf16 else 'stage 2, or [strategy]'} version from 0.18.3 on"
            )
    if not is_offloaded and (master_fp16 or (master_bf16 and not bf16.bf16_optimizer_states)):
        key = "fp16.fp16_master_weights_and_grads" if master_fp16 else "bf16.bf16_master_weights_and_grads"
        raise InputError(f"{where}: {key}: needs zero_optimization.offload_optimizer (DeepSpeedCPUAdam)")


def check_optimizer(reading: Reading, zero: ZeroConfig, release: Release) -> None:
    """Checks of the `optimizer` block: a name that DeepSpeed knows, and no `max_grad_norm`."""
    block = reading.file.optimizer
    if block is None or block.type is None:
        return
    where = f"{reading.where}: optimizer"
    name = block.type.lower()
    names = DEEPSPEED_OPTIMIZERS + (ONE_BIT_OPTIMIZERS if release.has_one_bit_optimizers else ())
    if name not in names and block.type not in TORCH_OPTIMIZERS:
        hint = did_you_mean(block.type, (*names, *TORCH_OPTIMIZERS))
        if name in ONE_BIT_OPTIMIZERS:
            raise InputError(
                f"{where}.type: DeepSpeed has no '{block.type}' since 0.19.7; expected strategy.version "
                "'0.19.6' or older, or another optimizer"
            )
        raise InputError(
            f"{where}.type: '{block.type}' is not an optimizer of DeepSpeed {release} or torch{hint}"
        )
    if name in ONE_BIT_OPTIMIZERS and zero.stage > 0:
        raise InputError(
            f"{where}.type: '{block.type}' does not go with ZeRO; expected stage 0, found {zero.stage}"
        )
    if "max_grad_norm" in block.params:
        raise InputError(f"{where}.params.max_grad_norm: DeepSpeed refuses it; expected 'gradient_clipping'")
    if name in ("lamb", "onebitlamb") and reading.file.fp16 is not None and reading.file.fp16.loss_scale:
        raise InputError(f"{where}.type: '{block.type}' needs dynamic loss scaling (fp16.loss_scale 0)")
