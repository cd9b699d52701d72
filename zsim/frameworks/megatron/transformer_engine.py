"""Transformer Engine under Megatron: the fused attention that it chooses, and the recipes of fp8 that it has.

Sources: pytorch/attention.py, then pytorch/attention/dot_product_attention/utils.py `get_attention_backend`.
common/fused_attn/fused_attn.cpp `nvte_get_fused_attn_backend`.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.experiment.training.attention import (
    HOPPER,
    has_cudnn_attention,
    has_dropped_scores,
    is_before,
    is_hopper,
)
from zsim.specs.experiment.training.table import AttentionChoice, TrainingTable
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.fp8 import TORCHAO_RECIPES, Fp8Recipe

_TORCHAO_EQUIVALENTS: dict[Fp8Recipe, Fp8Recipe] = {
    "torchao-tensorwise": "current",
    "torchao-rowwise": "block",
}


def choose_engine_attention(
    requested: AttentionChoice | None, gpus: Sequence[Gpu], model: ModelSpec, *, deterministic: bool
) -> AttentionChoice | None:
    """The generation of fused attention that Transformer Engine 1.2 to 2.18 chooses.

    It takes cuDNN's on Hopper, from 2.0 on also on Blackwell, in preference to FlashAttention-3 even where
    that is installed. In deterministic mode it takes FlashAttention-2's deterministic backward before Hopper.
    It also does on Blackwell where scores are dropped out, since cuDNN's deterministic backward there does
    not support that. On Blackwell, cuDNN's deterministic backward is assumed to be as fast as its other one,
    and to be available (cuDNN 9.18.1). On Hopper see `zsim.cost.rates.deterministic`.
    """
    is_default = requested in (None, "flash")
    is_flash_2 = is_default or requested == "flash2"
    has_cudnn = has_cudnn_attention(gpus)
    is_older = all(gpu.vendor == "nvidia" and is_before(gpu, HOPPER) for gpu in gpus)
    is_refused = has_cudnn and not is_hopper(gpus) and has_dropped_scores(model)
    if deterministic and is_flash_2 and (is_older or is_refused):
        return "flash2-deterministic"
    is_cudnn = is_default or requested == "cudnn"
    if deterministic and is_cudnn and has_cudnn and is_hopper(gpus):
        return "cudnn-deterministic"
    return "cudnn" if is_default and has_cudnn else requested


def check_engine_recipe(recipe: Fp8Recipe, training: TrainingTable, table: MegatronTable) -> None:
    """Raises for a recipe that Megatron lacks, and for settings beside one."""
    is_megatron = table.engine == "megatron"
    if is_megatron and recipe in TORCHAO_RECIPES:
        raise InputError(
            f"training.fp8_recipe: found '{recipe}' with strategy 'megatron', whose layers are Transformer "
            f"Engine's; the nearest that it has is '{_TORCHAO_EQUIVALENTS[recipe]}'"
        )
    if not is_megatron and training.fp8_recipe is not None:
        raise InputError(
            f"training.fp8_recipe: found '{recipe}', but engine '{table.engine}' has no recipes; expected "
            "engine 'megatron'"
        )
    if recipe == "delayed" and training.bf16_first_layers + training.bf16_last_layers:
        raise InputError(
            "training.bf16_first_layers, bf16_last_layers: Megatron refuses them with delayed scales, which "
            "are summed up once for all layers; the nearest recipe that takes them is 'current'"
        )
    if table.fp8_param_gather and recipe == "nvfp4":
        raise NotSimulatedError(
            "strategy.fp8_param_gather: zsim does not simulate weights that are kept in fp4 yet; expected "
            "false, or fp8_recipe 'mxfp8'"
        )
