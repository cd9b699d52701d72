"""Context parallelism: the model that one of c ranks computes, each on a part of every sequence.

All modules see 1/c of the tokens. Only attention needs those of other ranks, and its `context` says how their
K and V reach it, and recurrences, around which ranks exchange heads for tokens. Every rank has all
parameters, and data parallelism sums up their gradients over the ranks too.

# [Note: whose attention]
megatron: Transformer Engine's. torch: `torch.distributed.tensor.experimental.context_parallel`, whose rotate
method "alltoall" is "p2p" here. Where a layer has a window all are FlexAttention's, as torchtitan gives every
layer the one kind (v0.2.2 distributed/context_parallel.py `apply_cp_to_attention_module`). deepspeed and
autotp: `UlyssesSPAttentionHF`. Its data loader gives every rank of a group its own sequences, which the group
computes one after the other. So each is a micro-batch of the group, and `gradient_accumulation_steps` counts
them (DeepSpeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py `UlyssesSPDataLoaderAdapter`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from zsim.operations.operation import Role
from zsim.operations.sharding import FeatureCut
from zsim.specs.model.spec import ContextSharding, Exchange, ModelSpec, Module
from zsim.specs.strategy.mesh import CONTEXT
from zsim.specs.strategy.parallelism import ParallelismConfig


def context_parallel(model: ModelSpec, parallelism: ParallelismConfig) -> ModelSpec:
    """The model of one of `parallelism.context` ranks. With one rank it is the model itself."""
    ranks = parallelism.context
    if ranks == 1:
        return model
    share = ContextSharding(
        ranks,
        parallelism.context_method,
        parallelism.style.context_library,
        parallelism.context_inner,
        parallelism.context_masks,
    )
    return replace(
        model.map_blocks(lambda block: replace(block, modules=_split_modules(block.modules, share))),
        before=_split_modules(model.before, share),
        after=_split_modules(model.after, share),
        token_shards=model.token_shards * ranks,
    )


def _split_modules(modules: tuple[Module, ...], share: ContextSharding) -> tuple[Module, ...]:
    split: list[Module] = []
    for is_inner, group in groupby(modules, lambda module: module.op_spec.is_inner):
        run = tuple(group)
        split += _exchange_heads(run, share) if is_inner else [_split_module(part, share) for part in run]
    return tuple(split)


def _split_module(module: Module, share: ContextSharding) -> Module:
    work = module.op_spec.cut_sequences(share)
    return replace(module, op_spec=work, token_shards=module.token_shards * share.ranks)


def _exchange_heads(run: tuple[Module, ...], share: ContextSharding) -> Iterator[Module]:
    """The modules of a recurrence, on a part of its heads and complete sequences, between exchanges of heads
    for tokens (Megatron-LM d98e8a64 core/ssm/mamba_context_parallel.py and gated_delta_net/common.py).
    """
    core = next(module for module in run if module.role is Role.MIXER)
    shards = core.token_shards * share.ranks
    cut = FeatureCut(share.ranks, lambda features: max(1, features // share.ranks))
    for number, width in enumerate(core.op_spec.exchanged_inputs):
        yield _all_to_all(f"{core.name} in {number}", width, share.ranks, shards)
    for module in run:
        yield replace(module, op_spec=module.op_spec.cut_features(cut))
    for number, width in enumerate(core.op_spec.exchanged_outputs):
        yield _all_to_all(f"{core.name} out {number}", width, share.ranks, shards)


def _all_to_all(name: str, width: int, ranks: int, shards: int) -> Module:
    work = Exchange("all_to_all", "all_to_all", width, ranks, CONTEXT)
    return Module(f"{name} all_to_all", work, token_shards=shards)
