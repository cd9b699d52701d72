"""Context parallelism: the model that one of c ranks computes, each on a part of every sequence.

All modules see 1/c of the tokens. Only attention needs those of other ranks, and its `context` says how their
K and V reach it. Every rank has all parameters, and data parallelism sums up their gradients over the ranks
too.

# [Note: whose attention]
megatron: Transformer Engine's. torch: `torch.distributed.tensor.experimental.context_parallel`, whose rotate
method "alltoall" is "p2p" here. Where a layer has a window all are FlexAttention's, as torchtitan gives every
layer the one kind (v0.2.2 distributed/context_parallel.py `apply_cp_to_attention_module`). deepspeed and
autotp: `UlyssesSPAttentionHF`. Its data loader gives every rank of a group its own sequences, which the group
computes one after the other. So each is a micro-batch of the group, and `gradient_accumulation_steps` counts
them (DeepSpeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py `UlyssesSPDataLoaderAdapter`).
"""

from __future__ import annotations

from dataclasses import replace

from zsim.specs.model.spec import ContextSharding, ModelSpec, Module
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
    return tuple(_split_module(module, share) for module in modules)


def _split_module(module: Module, share: ContextSharding) -> Module:
    work = module.op_spec.cut_sequences(share)
    return replace(module, op_spec=work, token_shards=module.token_shards * share.ranks)
