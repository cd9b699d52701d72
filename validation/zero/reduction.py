"""Reduce one rank's gradients to its shard of their mean over all ranks.

# [Note: what each stage reduces, and what it keeps] When a unit's backward has ended, its gradients are in
`parameter.grad`. They move to a flat tensor in the reduce dtype, and then

- stage 0: at the last micro-batch all-reduce it; every rank keeps all of the sum;
- stage 1: at the last micro-batch reduce-scatter it; every rank keeps all of its *own* gradients (the sum
  over its micro-batches) until the step, and the reduced shard in its place among them;
- stages 2 and 3: reduce-scatter it in every micro-batch, keep only the running sum of shards. The flat
  tensor lives from the unit's backward to the end of its reduction.

# [Note: buckets]
Small units are reduced together. A reduce-scatter gives rank r the r-th part of the tensor, so the units'
parts have to be interleaved by rank: [A_0 B_0 | A_1 B_1 | ...] comes out as [A_r B_r].
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from validation.zero.collectives import Collectives, Pending
from validation.zero.config import ZeroConfig
from validation.zero.flat import Flat
from validation.zero.places import StateKeeper


@dataclass
class Bucket:
    """Units that are reduced together."""

    flats: list[Flat]
    pending: Pending
    output: Tensor


class Reducer:
    """Collects finished units and reduces them while backward goes on."""

    def __init__(self, config: ZeroConfig, comm: Collectives, keeper: StateKeeper) -> None:
        self.config = config
        self.comm = comm
        self.keeper = keeper
        self.local: dict[str, Tensor] = {}  # stages 0 and 1: this rank's gradients over micro-batches
        self._waiting: list[tuple[Flat, Tensor]] = []
        self._in_flight: deque[Bucket] = deque()

    def add(self, flat: Flat, *, is_first: bool, is_last: bool) -> None:
        """Take a unit whose backward has ended; `is_first` and `is_last` say which micro-batch it is."""
        if self.config.stage <= 1:
            if is_first:
                self.local[flat.name] = self._empty(flat)
            flat.take_gradients(self.local[flat.name], accumulate=not is_first)
            if not is_last:
                return
            gradients = self.local[flat.name]
        else:
            gradients = self._empty(flat)
            flat.take_gradients(gradients, accumulate=False)
        gradients.mul_(1.0 / self.comm.world_size)  # before the sum, so that fp16 does not overflow in it
        self._waiting.append((flat, gradients))
        if sum(tensor.nbytes for _, tensor in self._waiting) >= self.config.bucket_bytes:
            self._reduce_bucket(is_first)

    def finish(self, *, is_first: bool) -> None:
        """Reduce what is left and wait for all reductions."""
        if self._waiting:
            self._reduce_bucket(is_first)
        while self._in_flight:
            self._collect(self._in_flight.popleft(), is_first)

    def drop(self) -> None:
        """Forget all gradients, after a step."""
        self.local.clear()
        self.keeper.drop_gradients()

    def _empty(self, flat: Flat) -> Tensor:
        return torch.empty(flat.layout.padded_numel, dtype=self.config.reduce_dtype, device=flat.device)

    def _reduce_bucket(self, is_first: bool) -> None:
        while len(self._in_flight) >= max(1, self.config.max_reductions_in_flight):
            self._collect(self._in_flight.popleft(), is_first)
        flats = [flat for flat, _ in self._waiting]
        tensors = [tensor for _, tensor in self._waiting]
        self._waiting = []
        name = "+".join(flat.name for flat in flats)
        world = self.comm.world_size
        if self.config.stage == 0:
            joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            self._in_flight.append(Bucket(flats, self.comm.all_reduce(joined, name), joined))
            return
        if len(tensors) == 1:
            joined = tensors[0]
        else:  # [Note: buckets]
            joined = torch.cat([tensor.view(world, -1) for tensor in tensors], dim=1).view(-1)
        output = joined.new_empty(joined.numel() // world)
        self._in_flight.append(Bucket(flats, self.comm.reduce_scatter(output, joined, name), output))

    def _collect(self, bucket: Bucket, is_first: bool) -> None:
        """Wait for a bucket and put each unit's part where the stage keeps it."""
        bucket.pending.wait()
        start = 0
        for flat in bucket.flats:
            stop = start + (flat.owned.stop - flat.owned.start)
            piece = bucket.output[start:stop]
            start = stop
            if self.config.stage <= 1:  # in place among this rank's unreduced gradients
                target = self.local[flat.name][flat.owned]
                if target.data_ptr() != piece.data_ptr():
                    target.copy_(piece)
                self.keeper.add_gradient(flat.name, target, is_first=True)
            else:
                self.keeper.add_gradient(flat.name, piece, is_first=is_first)
