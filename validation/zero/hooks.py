"""When parameters are gathered and freed, and gradients reduced: hooks on a unit's module.

    forward:   gather, (gather the next ones ahead), compute, free
    backward:  gather, (gather the previous ones ahead), compute, free, reduce-scatter

# [Note: where backward begins and ends]
torch has module hooks for backward, but they fire too early when an input needs no gradient. So:
backward of a unit *begins* when the first gradient of one of its outputs arrives (a tensor hook); it *ends*
when the gradients of its inputs are done, which a no-op in the graph in front of the module tells
(`BackwardEnd`). A unit whose inputs need no gradient, the first one say, ends when the whole backward does.

# [Note: checkpointing runs forward inside backward]
A checkpoint around a unit calls the module again during backward, hooks and all, and may stop halfway. The
unit is gathered then, and its backward comes next, so hooks that find backward running do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from validation.tracing import Tracer
from validation.zero.flat import Flat


class Unit:
    """A module whose parameters are gathered, freed and reduced together."""

    def __init__(self, name: str, module: nn.Module, flats: Sequence[Flat], *, is_kept: bool) -> None:
        self.name = name
        self.module = module
        self.flats = list(flats)
        self.is_kept = is_kept  # stays gathered from forward to backward
        self.open_uses = 0  # forwards of this micro-batch whose backward has not ended
        self.is_finished = False

    def start_gather(self) -> None:
        for flat in self.flats:
            flat.start_gather()

    def gather(self) -> None:
        self.start_gather()
        for flat in self.flats:
            flat.finish_gather()

    def free(self) -> None:
        for flat in self.flats:
            flat.free()

    def fetch(self) -> None:
        for flat in self.flats:
            if flat.keeper is not None and not flat.is_gathered and flat.pending is None:
                flat.keeper.fetch(flat.name)


class BackwardEnd(torch.autograd.Function):
    """An identity op whose backward signals that the backward of everything after it is done."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.callback()
        return (None, *gradients)


class Schedule:
    """Gathers and frees units as the model runs, and records their order to gather ahead."""

    def __init__(
        self,
        units: Sequence[Unit],
        shards: bool,
        prefetch: int,
        on_finish: Callable[[Unit], None],
        tracer: Tracer,
    ) -> None:
        self.units = list(units)
        self.shards_parameters = shards
        self.prefetch = prefetch
        self.on_finish = on_finish
        self.tracer = tracer
        self.in_backward = False
        self.order: list[Unit] = []  # of forwards, as recorded in the first one
        self.is_recorded = False
        self._position = 0
        self._compute: dict[str, dict[str, Any]] = {}
        self._handles = [
            handle
            for unit in self.units
            for handle in (
                unit.module.register_forward_pre_hook(
                    self._pre_forward(unit), with_kwargs=True, prepend=True
                ),
                unit.module.register_forward_hook(self._post_forward(unit), with_kwargs=True),
            )
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    # -- forward --------------------------------------------------------------------------------------

    def _pre_forward(self, unit: Unit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.in_backward:  # [Note: checkpointing runs forward inside backward]
                unit.gather()
                return None
            if unit is self.units[0]:
                self._position = 0
                for each in self.units:
                    each.is_finished = False
            self.tracer.phase = "forward"
            unit.gather()
            self._gather_ahead_forward(unit)
            self._begin(unit)
            if not torch.is_grad_enabled():
                return None
            return self._mark_backward_end(unit, args, kwargs)

        return hook

    def _gather_ahead_forward(self, unit: Unit) -> None:
        if not self.is_recorded:
            self.order.append(unit)
            return
        if self._position >= len(self.order) or self.order[self._position] is not unit:
            self.order, self.is_recorded = [unit], False  # another path through the model: record anew
            self._position = 0
        self._position += 1
        ahead = self.order[self._position : self._position + self.prefetch]
        for following in ahead:
            following.start_gather()
        for following in self.order[self._position + len(ahead) :][:1]:
            following.fetch()

    def _post_forward(self, unit: Unit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.in_backward:
                return
            self._end(unit)
            if self.shards_parameters and not (unit.is_kept and torch.is_grad_enabled()):
                unit.free()
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._pre_backward(unit))
            if unit is self.units[0]:
                self.is_recorded = True

        return hook

    # -- backward -------------------------------------------------------------------------------------

    def _mark_backward_end(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        """Insert a `BackwardEnd` at every input that needs a gradient."""
        marked = [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if not marked:
            return None
        unit.open_uses += 1
        results = iter(BackwardEnd.apply(lambda: self._use_ended(unit), *marked))

        def mark(leaf: Any) -> Any:
            return next(results) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf

        return tree_map(mark, (args, kwargs))

    def _pre_backward(self, unit: Unit) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if unit.is_finished or unit.name in self._compute:
                return
            self.in_backward = True
            self.tracer.phase = "backward"
            unit.gather()
            self._gather_ahead_backward(unit)
            self._begin(unit)

        return hook

    def _gather_ahead_backward(self, unit: Unit) -> None:
        if unit not in self.order:
            return
        last = len(self.order) - 1 - self.order[::-1].index(unit)
        before = [other for other in reversed(self.order[:last]) if not other.is_finished]
        for previous in before[: self.prefetch]:
            previous.start_gather()
        for previous in before[self.prefetch :][:1]:
            previous.fetch()

    def _use_ended(self, unit: Unit) -> None:
        unit.open_uses -= 1
        if unit.open_uses == 0:
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        self._end(unit)
        unit.is_finished = True
        if self.shards_parameters:
            unit.free()
        self.on_finish(unit)

    def end_backward(self) -> None:
        """Finish the units whose end nothing signalled, in the order of backward: the root last."""
        for unit in (*reversed(self.units[1:]), self.units[0]):
            if not unit.is_finished:
                self._finish(unit)
            unit.open_uses = 0
        self.in_backward = False

    # -- trace ----------------------------------------------------------------------------------------

    def _begin(self, unit: Unit) -> None:
        self._compute[unit.name] = self.tracer.begin("comp", self.tracer.phase, unit=unit.name)

    def _end(self, unit: Unit) -> None:
        event = self._compute.pop(unit.name, None)
        if event is not None:
            self.tracer.end(event)


def units_in_forward_order(schedule: Schedule) -> Iterator[Unit]:
    """Every unit once, in the order of first use; includes all units even before the first forward."""
    yield from dict.fromkeys([*schedule.order, *schedule.units])
