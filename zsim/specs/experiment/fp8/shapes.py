"""Tokens and features that a recipe of fp8 training can cast."""

from __future__ import annotations

from math import gcd

from zsim.errors import InputError
from zsim.specs.model.spec import Activation, Attention, Linear, ModelSpec
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.training import TrainingConfig


def check_fp8_shapes(model: ModelSpec, training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    """Raises InputError for tokens and, on a tensor-parallel rank, features that a recipe cannot cast.

    The gradient of a weight sums over tokens, and fp8 products sum over multiples of 16 elements only.
    torch's `_scaled_mm` refuses others ("Expected trailing dimension of mat1 to be divisible by 16"). torchao
    pads only where `pad_inner_dim` asks for it (False by default, and torchtitan leaves it so). Transformer
    Engine's `assert_dim_for_fp8_exec` refuses sizes that are not multiples of 8, and its mxfp8 tensors those
    that are not multiples of 32 in both dimensions. With blocks of 128, a part that is gathered must be whole
    blocks (`is_quantizable`), else it is gathered in 16 bits.

    Sources: pytorch/ao issue 571, torchao/float8/config.py. NVIDIA/TransformerEngine 2.17, pytorch/utils.py,
    csrc/quantizer.cpp.
    """
    if training.precision != "fp8":
        return
    _check_tokens(training, parallelism)
    ranks, multiple = parallelism.tensor, training.fp8.dimension_multiple
    for block in model.unique_blocks:
        is_row_split = False
        for module in block.modules:
            work = module.op_spec
            if isinstance(work, Attention | Activation):
                is_row_split = True
            if not isinstance(work, Linear) or work.in_bf16 or not _has_fp8_weight(module.parameters):
                continue
            split_size = work.in_features if is_row_split else work.out_features
            unsplit_size = work.out_features if is_row_split else work.in_features
            is_row_split = False
            for length in (split_size / ranks, unsplit_size):
                if length % multiple and (ranks > 1 or training.fp8.is_transformer_engine):
                    shape = f"{work.in_features:,} x {work.out_features:,}"
                    suffix = f" on each of {ranks} tensor-parallel ranks" if ranks > 1 else ""
                    raise InputError(
                        f"training.fp8_recipe: '{training.fp8.recipe}' casts multiples of {multiple} "
                        f"elements, "
                        f"but '{module.name}' ({shape}) has {length:,g}{suffix}; "
                        + _nearest_shape(length, multiple)
                    )


def _has_fp8_weight(parameters: tuple[object, ...]) -> bool:
    return any(getattr(parameter, "in_fp8", False) for parameter in parameters)


def _nearest_shape(length: float, multiple: int) -> str:
    if not length % 16 and multiple == 32:
        return "the nearest recipe that takes it is 'current'"
    return "expected fewer tensor-parallel ranks, or precision 'bf16'"


def _check_tokens(training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    shards, multiple = parallelism.context, training.fp8.dimension_multiple
    if training.fp8.gathered_multiple > 1 and parallelism.sequence_parallel and parallelism.tensor > 1:
        shards, multiple = shards * parallelism.tensor, training.fp8.gathered_multiple
    tokens, divisor = training.micro_batch_tokens, multiple * shards
    if tokens % divisor == 0:
        return
    step = divisor // gcd(training.micro_batch_size, divisor)
    suffix = f" ({multiple} on each of {shards} ranks)" if shards > 1 else ""
    length = training.sequence_length
    nearest = max(step, round(length / step) * step)
    raise InputError(
        f"training.sequence_length: found {length:,} (times micro_batch_size {training.micro_batch_size:,}: "
        f"{tokens:,} tokens) with precision fp8, expected a number of tokens that {divisor} divides{suffix}: "
        f"the gradients of weights are products over them, which torch refuses otherwise; the nearest "
        f"sequence_length is {nearest:,}"
    )
