"""ZeRO: train any model on many ranks, each of which holds a part of the model states.

    engine = ZeroEngine(model, ZeroConfig(stage=3))
    for tokens, labels in batches:
        engine.backward(engine(tokens, labels).loss)
        engine.step()

Memory per rank for N parameters trained in bf16 with AdamW on W ranks, as in figure 1 of the paper
(`closed_forms.py` has the bytes with padding):

    stage   parameters   gradients   master and moments      sent and received per step
      0        2 N          2 N            12 N                   2 N   all-reduce
      1        2 N          2 N            12 N / W               2 N   reduce-scatter, all-gather
      2        2 N          2 N / W        12 N / W               2 N   the same, during backward
      3        2 N / W      2 N / W        12 N / W               3 N   gather twice, reduce-scatter once
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_map

from validation.tracing import SILENT, Tracer
from validation.zero.adamw import step_shard
from validation.zero.collectives import Collectives
from validation.zero.config import ZeroConfig
from validation.zero.flat import Flat, Initialize
from validation.zero.hooks import Schedule, Unit, units_in_forward_order
from validation.zero.nvme import NvmeParameters, NvmeStates
from validation.zero.partition import Part, find_blocks, partition
from validation.zero.places import (
    DeviceParameters,
    HostParameters,
    MemoryStates,
    ParameterKeeper,
    StateKeeper,
)
from validation.zero.reduction import Reducer
from validation.zero.scaler import LossScaler


class ZeroEngine:
    """A model on one rank of `group`. The model's own parameters are replaced by views; train it only through
    the engine.

    `blocks`: the modules that become separate units; None takes all members of the outermost ModuleLists.
    `initialize(name, tensor)` fills parameters that are on the meta device, one unit at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ZeroConfig,
        *,
        blocks: Sequence[nn.Module] | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        initialize: Initialize | None = None,
        tracer: Tracer = SILENT,
    ) -> None:
        self.model = model
        self.config = config
        self.device = torch.device(device)
        self.tracer = tracer
        self.comm = Collectives(group or _world(), config.reduce_scatter, tracer)
        self.states = self._make_state_keeper()
        self.parameters = self._make_parameter_keeper()
        self.scaler = LossScaler(
            2.0**16 if config.loss_scale == "dynamic" else config.loss_scale,
            config.scale_window if config.loss_scale == "dynamic" else 0,
        )
        self.step_count = 0
        self.gradient_norm: float | None = None
        self._micro = 0
        parts = partition(model, find_blocks(model) if blocks is None else blocks)
        units = [self._make_unit(part, initialize, is_last=part is parts[-1]) for part in parts]
        self.reducer = Reducer(config, self.comm, self.states)
        self.schedule = Schedule(units, config.stage == 3, config.prefetch, self._reduce, tracer)
        self.flats = [flat for unit in units for flat in unit.flats]
        self.trained = {flat.name: flat for flat in self.flats if flat.is_trainable}
        self.comm.calls.clear()

    # -- construction ---------------------------------------------------------------------------------

    def _make_state_keeper(self) -> StateKeeper:
        config = self.config
        if config.optimizer_place == "nvme":
            assert config.nvme_folder is not None
            return NvmeStates(config.nvme_folder, self.comm.rank, self.tracer, config.reduce_dtype)
        return MemoryStates(is_host=config.optimizer_place == "host")

    def _make_parameter_keeper(self) -> ParameterKeeper | None:
        config = self.config
        if config.stage < 3:
            return None
        if config.parameter_place == "nvme":
            assert config.nvme_folder is not None
            return NvmeParameters(config.nvme_folder, self.comm.rank, self.tracer, self.device)
        return HostParameters(self.device) if config.parameter_place == "host" else DeviceParameters()

    def _make_unit(self, part: Part, initialize: Initialize | None, *, is_last: bool) -> Unit:
        flats = []
        for members, suffix in ((part.trained, ""), (part.frozen, ".frozen")):
            if not members:
                continue
            flat = Flat(part.name + suffix, members, self.config, self.comm, self.device)
            wide = flat.build(members, initialize)
            self._keep(flat, wide)
            flats.append(flat)
        is_kept = self.config.keep_gathered and (part.name == "root" or is_last)
        return Unit(part.name, part.module, flats, is_kept=is_kept)

    def _keep(self, flat: Flat, wide: Tensor) -> None:
        """Create this rank's part of the states in their places. fp32 weights on the device are also the
        master weights: there is one copy."""
        config = self.config
        is_own_master = (
            config.compute_dtype is torch.float32
            and config.optimizer_place == config.parameter_place == "device"
        )
        if config.stage < 3:
            if flat.is_trainable:
                own = flat.full[flat.owned] if is_own_master else wide[flat.owned].clone()
                self.states.create(flat.name, own)
            return
        master = wide[flat.owned].clone()
        if flat.is_trainable:
            self.states.create(flat.name, master)
        assert self.parameters is not None
        is_shared = is_own_master or (not flat.is_trainable and config.compute_dtype is torch.float32)
        self.parameters.create(flat.name, master if is_shared else master.to(config.compute_dtype, copy=True))
        flat.keeper = self.parameters
        flat.free()

    # -- a step ---------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        self.tracer.step, self.tracer.micro = self.step_count, self._micro
        if self.config.broadcast_buffers and self.model.training:
            for name, buffer in self.model.named_buffers():
                self.comm.broadcast(buffer, name)
        if self.config.compute_dtype is not torch.float32:
            args, kwargs = tree_map(self._to_compute_dtype, (args, kwargs))
        return self.model(*args, **kwargs)

    def _to_compute_dtype(self, leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(self.config.compute_dtype) if is_float else leaf

    def backward(self, loss: Tensor) -> None:
        """Run backward of one micro-batch; `loss` is the micro-batch's mean, and the step uses the mean over
        micro-batches."""
        factor = self.scaler.scale / self.config.accumulation_steps
        (loss if factor == 1.0 else loss * factor).backward()
        self.schedule.end_backward()
        self.reducer.finish(is_first=self._micro == 0)
        self._micro += 1

    def _reduce(self, unit: Unit) -> None:
        is_last = self._micro == self.config.accumulation_steps - 1
        for flat in unit.flats:
            if flat.is_trainable:
                self.reducer.add(flat, is_first=self._micro == 0, is_last=is_last)

    def step(self) -> bool:
        """Clip, update, publish; returns False if the gradients overflowed and the step was skipped."""
        if self._micro != self.config.accumulation_steps:
            raise RuntimeError(f"step after {self._micro} of {self.config.accumulation_steps} micro-batches")
        self.tracer.phase = "optimizer"
        self._micro = 0
        factor = self._gradient_factor()
        if factor is not None:
            self.step_count += 1
            self._update(factor)
        self.scaler.update(overflowed=factor is None)
        self.reducer.drop()
        return factor is not None

    def _gradient_factor(self) -> float | None:
        """The factor for gradients, which combines unscaling and clipping; None if they overflowed."""
        scale, limit = self.scaler.scale, self.config.gradient_clipping
        if scale == 1.0 and not limit:
            return 1.0
        norms = [torch.linalg.vector_norm(self.states.gradient(name).float()) for name in self.trained]
        square = torch.stack([norm.to(self.device) for norm in norms]).square().sum()
        if self.config.stage:  # the shards of all ranks together form the gradient, each element once
            self.comm.all_reduce(square, "gradient norm").wait()
        self.gradient_norm = float(square.sqrt()) / scale
        if not torch.isfinite(square):
            return None
        clip = min(1.0, limit / (self.gradient_norm + 1e-6)) if limit else 1.0
        return clip / scale

    def _update(self, factor: float) -> None:
        """AdamW on every shard; stages 1 and 2 gather updated parameters while other shards are updated."""
        order = [flat.name for unit in units_in_forward_order(self.schedule) for flat in unit.flats]
        names = [name for name in order if name in self.trained]
        with torch.no_grad(), self.tracer.span("phase", "optimizer"):
            for name, states, gradient in self.states.walk(names):
                flat = self.trained[name]
                with self.tracer.span("comp", "adamw", unit=name):
                    if factor != 1.0:
                        gradient.mul_(factor)
                    step_shard(flat.layout, flat.owned, self.config, self.step_count, states, gradient)
                flat.pending = flat.publish(states.master)

    # -- inspection -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for gathers that the last step left under way."""
        for flat in self.flats:
            flat.finish_gather()

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, value) of every parameter, gathered unit by unit; all ranks must iterate together."""
        for flat in self.flats:
            was_gathered = flat.is_gathered
            flat.start_gather()
            flat.finish_gather()
            for slot in flat.layout.slots:
                yield slot.name, flat.full[slot.start : slot.stop].view(slot.shape).clone()
            if not was_gathered:
                flat.free()

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """(place, category, tensor) of everything the engine holds."""
        for flat in self.flats:
            yield "device", "buffers" if self.config.stage == 3 else "parameters", flat.full
            yield "device", "buffers", flat.absent
        for tensor in self.reducer.local.values():
            yield "device", "gradients", tensor
        if self.parameters is not None:
            place = "device" if self.config.parameter_place == "device" else "host"
            yield from ((place, category, tensor) for category, tensor in self.parameters.tensors())
        place = "device" if self.config.optimizer_place == "device" else "host"
        yield from ((place, category, tensor) for category, tensor in self.states.tensors())

    def held_bytes(self) -> dict[str, dict[str, int]]:
        """Live bytes by place and category; each storage counts once, in its first category in `tensors`."""
        seen: set[int] = set()
        held: dict[str, dict[str, int]] = {"device": {}, "host": {}, "nvme": {}}
        for place, category, tensor in self.tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                held[place][category] = held[place].get(category, 0) + storage.nbytes()
        for category, keeper in (("optimizer_states", self.states), ("parameters", self.parameters)):
            if keeper is not None and keeper.file_bytes():
                held["nvme"][category] = keeper.file_bytes()
        return held

    def close(self) -> None:
        """Remove hooks, finish I/O, delete offload files."""
        self.settle()
        self.schedule.close()
        self.states.close()
        if self.parameters is not None:
            self.parameters.close()


def _world() -> dist.ProcessGroup:
    """The group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD
