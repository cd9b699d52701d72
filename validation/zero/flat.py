"""A flat tensor with the parameters as views: gathered when its unit computes, a shard when it does not.

# [Note: freeing storage, not tensors]
Autograd saves the weights that backward needs, so dropping our own reference to a gathered weight frees
nothing. The *storage* is emptied instead (`resize_(0)`), and filled again by the gather in backward: what
autograd saved then sees the gathered data, because it is the same storage. Reading emptied storage would
crash, so a parameter that is not gathered shows one NaN in its own shape. Storage that is allocated but
not gathered yet would be silently wrong; `ZeroConfig.poison` detects this.

# [Note: writing behind autograd's back] Autograd refuses to run backward through a weight that was written to
since forward, and detects this by a version counter. Parameters are attached by `parameter.data = view`,
which keeps their version counter, so gathering into the flat tensor is not a write to the parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
from torch import Tensor

from validation.zero.collectives import Collectives, Pending
from validation.zero.config import ZeroConfig
from validation.zero.layout import Layout
from validation.zero.partition import Member
from validation.zero.places import ParameterKeeper

Initialize = Callable[[str, Tensor], None]


class Flat:
    """Parameters of one unit that are all trained, or all frozen; a unit has at most one Flat of each kind.

    `full`: the flat tensor in the compute dtype; stage 3 empties its storage. `absent`: the value that
    parameters show then. `owned`: the elements this rank updates: everything in stage 0, else its shard."""

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        config: ZeroConfig,
        comm: Collectives,
        device: torch.device,
    ) -> None:
        self.name = name
        self.config = config
        self.comm = comm
        self.device = device
        self.parameters = [member.parameter for member in members]
        self.is_trainable = self.parameters[0].requires_grad
        self.layout = Layout.of([(m.name, tuple(m.parameter.shape)) for m in members], comm.world_size)
        self.shard = self.layout.shard_of(comm.rank)
        self.owned = slice(0, self.layout.padded_numel) if config.stage == 0 else self.shard
        self.full = self.absent = torch.empty(0)
        self.keeper: ParameterKeeper | None = None  # stage 3 only
        self.pending: Pending | None = None
        self.is_gathered = True

    # -- construction ---------------------------------------------------------------------------------

    def build(self, members: Sequence[Member], initialize: Initialize | None) -> Tensor:
        """Make `full` from the parameters, equal on all ranks, and attach them to it.

        Returns the whole flat tensor in fp32.
        """
        wide = torch.zeros(self.layout.padded_numel, dtype=torch.float32, device=self.device)
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            view = wide[slot.start : slot.stop].view(slot.shape)
            if not parameter.is_meta:
                view.copy_(parameter.detach())
            elif initialize is not None:
                initialize(slot.name, view)
            else:
                raise ValueError(f"{slot.name} is on the meta device; the engine needs `initialize` for it")
        self.comm.broadcast(wide, self.name)
        self.full = wide.to(self.config.compute_dtype)
        self.absent = self.full.new_full((), float("nan"))
        for index, member in enumerate(members):
            if member.parameter.is_meta:  # its device cannot change: a new parameter replaces it
                self.parameters[index] = nn.Parameter(self.full.new_empty(0), requires_grad=self.is_trainable)
                for module, attribute in member.places:
                    module._parameters[attribute] = self.parameters[index]
        self._attach(self.full)
        return wide

    def _attach(self, source: Tensor) -> None:
        """Make parameters views of the flat tensor, or, if `source` is a scalar, expand the scalar to their
        shapes."""
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            if source.dim():
                parameter.data = source[slot.start : slot.stop].view(slot.shape)
            else:
                parameter.data = source.expand(slot.shape)

    # -- gathering ------------------------------------------------------------------------------------

    @property
    def full_bytes(self) -> int:
        return self.layout.padded_numel * self.config.compute_dtype.itemsize

    def start_gather(self) -> None:
        """Allocate the full tensor and begin to gather it; does nothing if that has happened already."""
        if self.is_gathered or self.pending is not None:
            return
        assert self.keeper is not None
        shard = self.keeper.take(self.name)
        self.full.untyped_storage().resize_(self.full_bytes)
        self.comm.tracer.memory("buffers", self.full_bytes, self.full_bytes, self.name)
        if self.config.poison:
            self.full.fill_(float("nan"))
        self.pending = self.comm.all_gather(self.full, shard, self.name)

    def finish_gather(self) -> None:
        """Wait until the parameters are gathered."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
            if not self.is_gathered:
                self._attach(self.full)
                self.is_gathered = True

    def free(self) -> None:
        """Free the full tensor's memory. [Note: freeing storage, not tensors]"""
        self.finish_gather()
        if self.is_gathered:
            self._attach(self.absent)
            self.full.untyped_storage().resize_(0)
            self.comm.tracer.memory("buffers", -self.full_bytes, 0, self.name)
            self.is_gathered = False

    # -- after a step ---------------------------------------------------------------------------------

    def publish(self, master: Tensor) -> Pending | None:
        """Write the updated fp32 part to the parameters: to this rank's, and with stages 1 and 2 to all
        ranks'."""
        if self.config.stage == 3:
            assert self.keeper is not None
            self.keeper.put(self.name, master)
            return None
        part = self.full[self.owned]
        if part.data_ptr() != master.data_ptr():
            part.copy_(master)
        return self.comm.all_gather(self.full, part, self.name) if self.config.stage else None

    # -- gradients ------------------------------------------------------------------------------------

    def take_gradients(self, into: Tensor, *, accumulate: bool) -> None:
        """Move gradients to the places of their parameters in `into`; a missing gradient counts as zero."""
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            place = into[slot.start : slot.stop]
            if parameter.grad is None:
                if not accumulate:
                    place.zero_()
                continue
            gradient = parameter.grad.reshape(-1)
            if accumulate:
                place.add_(gradient)
            else:
                place.copy_(gradient)
            parameter.grad = None
        if not accumulate:
            into[self.layout.numel :].zero_()
