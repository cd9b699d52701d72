"""Adapters of products that tensor parallelism has cut.

# [Note: adapters in parts]
Megatron-Bridge 0.6.0 peft/utils.py, `ParallelLinearAdapter`. On a column the first weight is cut along the
rank, reads what the column has gathered (Transformer Engine returns it), and its output is gathered. The
second is cut along its outputs. On a row the first is cut along its inputs, and its output reduced. The
second's output is gathered, and with sequence parallelism each rank goes on with its tokens, whose gradient
is gathered. The gradient of the second's input is reduced beneath the product for its weight. That of the
first's is reduced so too without sequence parallelism, with which it is a part of what the column scatters.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.plan.parallel.sharded_parameters import shard_parameter
from zsim.specs.model.spec import (
    AdapterInput,
    AdapterSum,
    Exchange,
    ExchangeKind,
    Linear,
    Module,
    OverlappedCollectives,
)


def shard_adapter(module: Module, ranks: int, stream: int, *, is_row: bool) -> list[Module]:
    """Shard one module of an adapter on the product before it, a column or a row, among `ranks` ranks.
    `stream` is the number of parts into which the residual stream's tokens are cut.
    """
    work, is_sequence_parallel = module.op_spec, stream > 1
    if isinstance(work, AdapterInput):
        return [replace(module, op_spec=replace(work, width=work.width // ranks)) if is_row else module]
    if isinstance(work, AdapterSum):
        token_shards = stream if is_row else 1
        width = work.width if is_row else work.width // ranks
        cut = replace(module, op_spec=replace(work, width=width), token_shards=token_shards)
        is_scattered = is_row and is_sequence_parallel
        scatter = [_exchange(module.name, None, "all_gather", work.width, ranks)] if is_scattered else []
        return [*scatter, cut]
    assert isinstance(work, Linear)
    if work.is_adapter and is_row:
        cut = _shard(module, replace(work, in_features=work.in_features // ranks), 1, ranks)
        return [cut, _exchange(module.name, "all_reduce", None, work.out_features, ranks)]
    if work.is_adapter:
        beneath = None if is_sequence_parallel else OverlappedCollectives("all_reduce")
        local = replace(work, out_features=work.out_features // ranks, overlapped_collectives=beneath)
        gather = _exchange(module.name, "all_gather", None, work.out_features, ranks)
        return [_shard(module, local, 0, ranks), gather]
    local = replace(
        work,
        out_features=work.out_features // ranks,
        overlapped_collectives=OverlappedCollectives("all_reduce"),
    )
    gathers = [_exchange(module.name, "all_gather", None, work.out_features, ranks)] if is_row else []
    return [_shard(module, local, 0, ranks), *gathers]


def _shard(module: Module, work: Linear, dimension: int, ranks: int) -> Module:
    """A product cut along a dimension of its weight."""
    parameters = tuple(shard_parameter(parameter, dimension, ranks) for parameter in module.parameters)
    return replace(module, op_spec=work, parameters=parameters)


def _exchange(
    name: str, forward: ExchangeKind | None, backward: ExchangeKind | None, width: int, ranks: int
) -> Module:
    return Module(f"{name} {forward or backward}", Exchange(forward, backward, width, ranks))
