"""The state of a group of parameters while a plan is made: whether it is gathered, and its gradients."""

from __future__ import annotations

from dataclasses import field

from zsim.dataclass import dataclass


@dataclass
class ParamGroupState:
    """The state of FSDPParamGroup. `post_forward_indices`: the group's indices in the order of forwards, one
    per forward whose backward has not run; a backward takes the last, which is the newest."""

    is_unsharded: bool = False
    is_sharded_post_forward: bool = False
    all_gather: int | None = None  # its event, while a result is pending
    all_gather_bytes: int = 0
    reshard_event: int | None = None
    post_forward_indices: list[int] = field(default_factory=list)


@dataclass
class Fsdp2UnitGradient:
    """The gradients of one group of parameters.

    `unsharded_bytes`: computed by autograd in this backward; `accumulated_bytes`: left by earlier
    micro-batches without reduction; `all_reduce_bytes`: buffer of the all-reduce, kept until the group's next
    reduction.
    """

    unsharded_bytes: int = 0
    accumulated_bytes: int = 0
    all_reduce_bytes: int = 0
    has_shard: bool = False
    post_reduce_event: int | None = None
