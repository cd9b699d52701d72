"""The state of a group of parameters while a plan is made: whether it is gathered, and its gradients."""

from __future__ import annotations

from collections.abc import Hashable
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

    @property
    def has_event(self) -> bool:
        """Whether an event is waited for."""
        return self.reshard_event is not None or bool(self.all_gather and self.all_gather >= 0)

    @property
    def summary(self) -> Hashable:
        """All but the events."""
        is_pending = self.all_gather is not None
        return (
            self.is_unsharded,
            self.is_sharded_post_forward,
            is_pending,
            tuple(self.post_forward_indices),
        )

    def restore(self, summary: tuple[bool, bool, bool, tuple[int, ...]]) -> None:
        """Go on as from a `summary`, without an event."""
        self.is_unsharded, self.is_sharded_post_forward, is_pending, indices = summary
        self.all_gather, self.all_gather_bytes, self.reshard_event = -1 if is_pending else None, 0, None
        self.post_forward_indices = list(indices)


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

    @property
    def has_event(self) -> bool:
        """Whether an event is waited for."""
        return self.post_reduce_event is not None

    @property
    def summary(self) -> Hashable:
        """All but the event."""
        return (
            self.unsharded_bytes,
            self.accumulated_bytes,
            self.all_reduce_bytes,
            self.partial_bytes,
            self.has_shard,
        )

    def restore(self, summary: tuple[int, int, int, int, bool]) -> None:
        """Go on as from a `summary`, without an event."""
        (
            self.unsharded_bytes,
            self.accumulated_bytes,
            self.all_reduce_bytes,
            self.partial_bytes,
            self.has_shard,
        ) = summary
        self.post_reduce_event = None
