"""The parts of a layer that DeepSpeed's AutoTP gives its tensor-parallel ranks.

Features of attention are dealt out by key/value heads and all others evenly. What is left over goes to the
first ranks, one each, so that the first rank has the most of everything and the others wait for it. With
fewer key/value heads than ranks the last ranks have none (`get_shard_size`, DeepSpeed 0.16.4 to 0.19.8
module_inject/tp_shard.py). With a `tp_grain_size` above 1 features are dealt out in multiples of it. What is
left over is the last rank's since 0.19.6, and nobody's before.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.operations.operation import operations_of
from zsim.specs.model.spec import Activation, Attention, Block, Linear, ModelSpec
from zsim.specs.strategy.parallelism import ParallelismConfig

_EVEN = ("mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")  # in a layer's name
_HEADS = ("lm_head", "embed_out")
_GRAIN = "tensor_parallel.tp.tp_grain_size"


def set_tensor_grain(parallelism: ParallelismConfig, config: DeepSpeedConfig) -> ParallelismConfig:
    """The parallelism with the grain of AutoTP's parts.

    Releases that follow transformers' plan without knowing of heads know no grain either.
    """
    if not parallelism.style.cuts_unevenly or config.release.cuts_heads_in_two:
        return parallelism
    return replace(parallelism, tensor_grain=config.tp_grain_size)


def first_rank_features(total: int, ranks: int, name: str, num_kv_heads: int, grain: int = 1) -> int:
    """Rank 0's part of the `total` features of the layer `name`.

    The part is a multiple of `grain` where features are not dealt out by heads and there are as many as a
    grain.

    Raises NotSimulatedError where what a grain leaves over makes the last rank's part the largest.
    """
    by_heads = total % num_kv_heads == 0 and name not in _HEADS and not any(part in name for part in _EVEN)
    if by_heads:
        return total // num_kv_heads * -(-num_kv_heads // ranks)
    if total < grain:
        return -(-total // ranks)
    grains, remainder = divmod(total, grain)
    if remainder and grains % ranks == 0:
        raise NotSimulatedError(
            f"{_GRAIN}: found {grain}, which leaves {remainder:,} of the {total:,} features "
            f"of '{name}' to the last of {ranks} ranks, beyond the {grains // ranks * grain:,} that each "
            f"has; zsim simulates the first rank, expected a grain that divides {total:,}"
        )
    return -(-grains // ranks) * grain


def uneven_shards_note(
    model: ModelSpec, parallelism: ParallelismConfig, deepspeed: DeepSpeedConfig | None
) -> str | None:
    """The note on ranks with unequal parts, or None where they are equal.

    Raises InputError for releases that cut a head in two or lose features. Raises NotSimulatedError for parts
    of products of which AutoTP deals out each by a rule of its own.
    """
    if deepspeed is None or not parallelism.style.cuts_unevenly:
        return None
    tensor, descriptions = parallelism.tensor, dict[str, None]()
    _check_grain(model, parallelism.tensor_grain, deepspeed)
    for block in model.unique_blocks:
        for module in block.modules:
            op_spec = module.op_spec
            if isinstance(op_spec, Attention) and op_spec.num_kv_heads % tensor:
                descriptions[_describe_uneven_heads(op_spec, model, tensor, deepspeed)] = None
            elif isinstance(op_spec, Activation):
                grain = parallelism.tensor_grain
                part = first_rank_features(op_spec.width, tensor, module.name, model.num_kv_heads, grain)
                if part * tensor == op_spec.width:
                    continue
                descriptions[f"{part:,} of {op_spec.width:,} features of the MLP"] = None
            else:
                continue
            _check_separate_products(block, model, tensor)
    if not descriptions:
        return None
    return (
        f"AutoTP: the first of {tensor} tensor-parallel ranks has {' and '.join(descriptions)}; the step is "
        "that of this rank, for which the others wait"
    )


def _check_grain(model: ModelSpec, grain: int, deepspeed: DeepSpeedConfig) -> None:
    modules = [module for block in model.unique_blocks for module in block.modules]
    widths = [activation.width for activation in operations_of(modules, Activation)]
    uneven = [total for total in (*widths, model.vocab_size) if total >= grain and total % grain]
    if uneven and not deepspeed.release.gives_last_rank_the_rest:
        raise InputError(
            f"{_GRAIN}: found {grain}, which does not divide the {uneven[0]:,} features of a layer of "
            f"'{model.name}', and DeepSpeed {deepspeed.release} loses the rest; expected one that does, or "
            "strategy.version 0.19.6 or newer"
        )


def _describe_uneven_heads(
    op_spec: Attention, model: ModelSpec, tensor: int, deepspeed: DeepSpeedConfig
) -> str:
    groups = op_spec.num_kv_heads
    if deepspeed.release.cuts_heads_in_two:
        divisors = [number for number in range(1, groups + 1) if groups % number == 0]
        raise InputError(
            f"parallelism.tensor: found {tensor}, which does not divide the {groups} key/value heads of "
            f"'{model.name}', and DeepSpeed {deepspeed.release} cuts one in two; the nearest that divides is "
            f"{min(divisors, key=lambda number: abs(number - tensor))}, or strategy.version 0.19.6 or newer"
        )
    max_groups = -(-groups // tensor)
    heads = op_spec.num_heads // groups * max_groups
    text = f"{heads} of {op_spec.num_heads} heads ({max_groups} of {groups} of keys and values)"
    return text if groups > tensor else f"{text}, as have the {groups - 1} behind it, the others none"


def _check_separate_products(block: Block, model: ModelSpec, tensor: int) -> None:
    """Raises NotSimulatedError for products of which AutoTP's unequal parts are not known.

    These are one product that makes q, k and v, or gate and up, a latent vector that ranks share, and
    adapters.
    """
    attention = operations_of(block.modules, Attention)
    widths = [activation.width for activation in operations_of(block.modules, Activation) if activation.gated]
    outputs = [product.out_features for product in operations_of(block.modules, Linear)]
    traits = {
        "makes queries, keys and values in one product": any(
            op_spec.num_heads * op_spec.qk_head_dim
            + op_spec.num_kv_heads * (op_spec.qk_head_dim + op_spec.v_head_dim)
            in outputs
            for op_spec in attention
        ),
        "has latent attention": any(op_spec.is_latent for op_spec in attention),
        "makes gate and up in one product": any(2 * width in outputs for width in widths),
        "has adapters": any(module.is_adapter_part for module in block.modules),
    }
    trait = next((trait for trait, has_trait in traits.items() if has_trait), None)
    if trait:
        raise NotSimulatedError(
            f"parallelism.tensor: found {tensor}, which does not divide the heads or the MLP of "
            f"'{model.name}', which {trait}; zsim knows AutoTP's unequal parts of separate products only"
        )
