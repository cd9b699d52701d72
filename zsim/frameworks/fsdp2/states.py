"""The state of a group of parameters while a plan is made: whether it is gathered, and its gradients."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ParamGroupState:
    """The state of FSDPParamGroup."""

    is_unsharded: bool = False
    is_sharded_post_forward: bool = False
    all_gather: int | None = None  # its event, while a result is pending
    all_gather_bytes: int = 0
    reshard_event: int | None = None
    post_forward_indices: list[int] = field(default_factory=list)
    """The group's indices in the order of forwards, one per forward whose backward has not run. A backward
    takes the last, which is the newest.
    """


@dataclass
class ParamGroupGradient:
    """The gradients of one group of parameters."""

    unsharded_bytes: int = 0
    """Bytes computed by autograd in this backward."""
    accumulated_bytes: int = 0
    """Bytes left by earlier micro-batches without reduction."""
    all_reduce_bytes: int = 0
    """Buffer of the all-reduce, kept until the group's next reduction."""
    partial_bytes: int = 0
    """Bytes of the shard's sum over micro-batches, which is not summed over the replicas yet."""
    has_shard: bool = False
    post_reduce_event: int | None = None
