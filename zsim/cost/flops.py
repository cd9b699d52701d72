"""FLOPs of a model, counted in the conventions that people quote.

Module level (`Module.forward_flops`): matrix products only, 2 m n k each, attention over all pairs, causal
or not, which is what torch's `FlopCounterMode` counts.

MFU convention (PaLM, Chowdhery et al. 2022, appendix B; MosaicML, torchtitan): 6 N + 12 L d S per token, N
with all embeddings, d = heads * head_dim, attention not causal. "Hardware" FLOPs add the recomputation.

Captured models with products that no formula of zsim's has (convolutions, frozen weights, attention that is
not causal) count the products themselves, forward and backward: 2 m n k each, attention over all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from zsim.operations.operation import Role, operations_of
from zsim.specs.model.expert_layer import mlp_module_range
from zsim.specs.model.spec import Attention, Block, ModelSpec, Module, Tower
from zsim.specs.strategy.training import Checkpointing, TrainingConfig

FLOPS_CONVENTION = "6N + 12LdS per token, N with embeddings"
_UP_PROJECTIONS = ("q_b_proj", "kv_b_proj")  # of latent attention, by transformers' names
_FROZEN_CONVENTION = "6N + 12LdS per token, N with embeddings, 4N of frozen ones"
TRACED_CONVENTION = "2mnk of every product, forward and backward, attention over all pairs"


def flops_convention(model: ModelSpec) -> str:
    """The convention by which `model_flops_per_token` counts."""
    if _counts_products(model):
        return TRACED_CONVENTION
    return FLOPS_CONVENTION if model.trainable_numel == model.numel else _FROZEN_CONVENTION


def _counts_products(model: ModelSpec) -> bool:
    """Whether the model was captured, and has products without a formula."""
    if model.captured is None:
        return False
    blocks = model.unique_blocks
    modules = [*model.before, *(module for block in blocks for module in block.modules), *model.after]
    return any(module.op_spec.counts_products for module in modules)


def attention_flops_per_token(model: ModelSpec, sequence_length: int) -> float:
    """4 S A L: scores and values of all layers, forward, over all pairs."""
    return _sum_over_blocks(model, lambda block: _core_flops(block, sequence_length))


def active_numel(model: ModelSpec) -> int:
    """Parameters that are active for one token: all but those of the experts it is not routed to."""
    return model.numel - round(_sum_over_blocks(model, _idle_experts))


def tower_flops_per_token(tower: Tower, training: TrainingConfig) -> tuple[float, float]:
    """FLOPs of a tower for each token of the sequences: (without recomputation, with it). Each part counts
    the parameters of its own rows, and attention over all pairs of rows that see each other: 6 N + 12 L d S,
    of frozen parameters 4 N, and 2 N + 4 d S without a backward.
    """
    samples = training.sounds if tower.sees_sounds else training.images
    if samples is None:
        return 0.0, 0.0
    forward, trained = 0.0, 0.0
    sequence_length, policy = training.sequence_length, training.tower_checkpointing
    in_blocks = {id(module) for block in tower.blocks for module in block.modules}
    again = 0.0
    for module in tower.modules:
        rows = samples.mean_rows(module.sample_rows) if module.sample_rows else float(sequence_length)
        rows *= module.rows_per_token
        span = round(samples.rows(module.sample_rows, 1)[1]) if module.sample_rows else 1
        core = module.forward_flops(span) if module.role is Role.MIXER else 0.0
        weights = module.numel if module.role in (Role.PRODUCT, Role.NORM) else 0
        products = rows * (2.0 * weights + core)
        forward += products
        if module.has_backward:
            trained += products + rows * (2.0 * module.trainable_numel * bool(weights) + core)
        if id(module) in in_blocks and module.has_backward:
            again += products if policy == "full" else rows * core if policy == "selective" else 0.0
    flops = (forward + trained) / sequence_length
    return flops, flops + again / sequence_length


def model_flops_per_token(model: ModelSpec, sequence_length: int) -> float:
    """6 N + 12 L d S, forward and backward, nothing recomputed. Frozen parameters count 4 N. A captured model
    counts its products. A tower's are `tower_flops_per_token`.
    """
    if model.towers:
        model = replace(model, towers=())
    if _counts_products(model):
        outer_flops = sum(module.training_flops(sequence_length) for module in (*model.before, *model.after))
        return outer_flops + _sum_over_blocks(
            model,
            lambda block: sum(module.training_flops(sequence_length) for module in block.modules),
        )
    frozen = 1 - model.trainable_numel / model.numel if model.numel else 0.0
    return (6.0 - 2.0 * frozen) * _used_numel(model, sequence_length) + 3.0 * attention_flops_per_token(
        model, sequence_length
    )


def forward_flops_per_token(model: ModelSpec, sequence_length: int) -> float:
    """FLOPs of one forward, 2 N + 4 d S over all layers: a third of `model_flops_per_token` without frozen
    weights. N counts as there.
    """
    if model.towers:
        model = replace(model, towers=())
    return 2.0 * _used_numel(model, sequence_length) + attention_flops_per_token(model, sequence_length)


def hardware_flops_per_token(
    model: ModelSpec,
    sequence_length: int,
    checkpointing: Sequence[Checkpointing] = (),
    modules: Collection[str] = (),
) -> float:
    """`model_flops_per_token` plus the recomputation, by the policy of each block (() for none): full adds
    the block's 2 N + 4 d S, selective 4 d S, selective-op N (every second product, so about half of 2 N).
    `modules` are Megatron's names of the modules that run again in every block in addition, whose products
    count.

    By convention (Korthikanti et al. 2022, appendix A) full recomputation counts as one full forward of the
    blocks, although torch stops before a last product whose result is not needed.
    """
    flops = model_flops_per_token(model, sequence_length)
    counts_products = _counts_products(model)
    for policy in sorted({*checkpointing} - {"none"}):
        blocks = [
            block
            for block, block_policy in zip(model.blocks, checkpointing, strict=True)
            if block_policy == policy
        ]
        recomputed_flops = _forward_products if counts_products and policy == "full" else _recomputed_flops
        flops += sum(
            count * recomputed_flops(block, sequence_length, policy) for block, count in _count_unique(blocks)
        )
    if modules:
        flops += _sum_over_blocks(model, lambda block: _rerun_flops(block, sequence_length, modules))
    return flops


def _rerun_flops(block: Block, sequence_length: int, names: Collection[str]) -> float:
    """FLOPs of a block's products that run again by Megatron's `names` (`zsim.plan.workload.reruns`)."""
    mlp_modules = [block.modules[number] for number in mlp_module_range(block.modules)[1]]
    routed = [module for module in mlp_modules if module.role in (Role.ROUTER, Role.EXPERTS)]
    rerun_modules: list[Module] = []
    if ("moe" if routed else "mlp") in names:
        rerun_modules = mlp_modules
    elif routed and "shared_experts" in names:
        rerun_modules = [module for module in mlp_modules if module not in routed]
    if "mla_up_proj" in names:
        rerun_modules = [
            *rerun_modules,
            *(module for module in block.modules if module.name.endswith(_UP_PROJECTIONS)),
        ]
    return sum(module.forward_flops(sequence_length) for module in rerun_modules)


def _forward_products(block: Block, sequence_length: int, policy: Checkpointing) -> float:
    return sum(module.forward_flops(sequence_length) for module in block.modules if block.is_wrapped)


def _recomputed_flops(block: Block, sequence_length: int, policy: Checkpointing) -> float:
    active = block.numel - _idle_experts(block) + _sample_numel(block, sequence_length)
    if policy == "selective-op":
        return active
    core = _core_flops(block, sequence_length)
    return core + 2.0 * active if policy == "full" else core


def _core_flops(block: Block, sequence_length: int) -> float:
    cores = (module for module in block.modules if module.role is Role.MIXER)
    return sum(module.forward_flops(sequence_length) for module in cores)


def _used_numel(model: ModelSpec, sequence_length: int) -> float:
    """Parameters that a token's products multiply, with those of a sample's rows as often as they run."""
    rows = _sum_over_blocks(model, lambda block: _sample_numel(block, sequence_length))
    return active_numel(model) + rows


def _sample_numel(block: Block, sequence_length: int) -> float:
    """Parameters that run on a sample's rows (cross-attention), as often as they run more than once a
    token.
    """
    rows = max((core.sample_keys for core in operations_of(block.modules, Attention)), default=0)
    if not rows:
        return 0.0
    return sum(module.numel for module in block.modules if module.sample_rows) * (rows / sequence_length - 1)


def _idle_experts(block: Block) -> float:
    """Parameters of the experts of a block that a token is not routed to."""
    idle = 0.0
    for module in block.modules:
        rows = 1.0 if module.role is Role.NORM else module.rows_per_token  # fewer of a product of one expert
        active_fraction = min(module.op_spec.active_fraction, rows)
        idle += module.numel * (1 - active_fraction) if active_fraction < 1 else 0.0
    return idle


def _sum_over_blocks(model: ModelSpec, measure: Callable[[Block], float]) -> float:
    """Sum of `measure` over all blocks. Every unique block is measured once."""
    return sum(count * measure(block) for block, count in _count_unique(model.blocks))


def _count_unique(blocks: Iterable[Block]) -> list[tuple[Block, int]]:
    counts: dict[int, tuple[Block, int]] = {}
    for block in blocks:
        counts[id(block)] = (block, counts.get(id(block), (block, 0))[1] + 1)
    return list(counts.values())
