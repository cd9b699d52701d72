"""What the tests run on ranks; `validation.launch` imports it there."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from validation.examples import blocks_of, make_model, vocab_of
from validation.network import received_bytes
from validation.record.run import minor_faults
from validation.training import TrainCase, micro_batches
from validation.zero import checkpoint
from validation.zero.closed_forms import FlatSize
from validation.zero.config import Stage, ZeroConfig
from validation.zero.engine import ZeroEngine
from zsim.comparison.plan_check import Call


@dataclass(frozen=True)
class EngineCase:
    """An engine on an example."""

    config: ZeroConfig
    model: str = "small"
    steps: int = 2
    seed: int = 0
    looks_for_foreign: bool = False


def make_engine(case: EngineCase) -> tuple[ZeroEngine, int]:
    model = make_model(case.model, case.seed)
    return ZeroEngine(model, case.config, blocks=blocks_of(model)), vocab_of(model)


def one_step(engine: ZeroEngine, vocab: int, rank: int, world_size: int, *, update: bool = True) -> float:
    case = TrainCase()
    loss_value = 0.0
    for index in range(engine.config.accumulation_steps):
        number = engine.step_count * engine.config.accumulation_steps + index
        for tokens, labels in micro_batches(case, number, rank, world_size, vocab):
            loss = engine(tokens, labels).loss
            engine.backward(loss)
            loss_value = float(loss.detach())
            del loss
    if update:
        engine.step()
    return loss_value


# -- bytes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bytes:
    """What an engine held and called. `foreign` is what else lived: tensors that nobody should hold."""

    flats: list[FlatSize]
    calls: list[Call]
    held_before_step: dict[str, dict[str, int]]
    held_after_step: dict[str, dict[str, int]]
    foreign: int
    received: list[int]


def live_storages() -> dict[int, int]:
    """Address -> bytes of every storage that a Python tensor holds."""
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter):
            storage = item.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
    return storages


def foreign_bytes(known: set[int]) -> int:
    """Bytes of live storages that are not known. gloo's threads let go of their tensors a moment after a
    collective has ended, so a storage is foreign if it stays."""
    for _ in range(100):
        foreign = sum(size for address, size in live_storages().items() if address not in known)
        if not foreign:
            break
        time.sleep(0.05)
    return foreign


def quiet_counter(interface: str) -> int:
    """Bytes the interface has received, read while no rank sends anything but a barrier."""
    if not interface:
        return 0
    dist.barrier()
    count = received_bytes(interface)
    dist.barrier()
    return count


def measure_bytes(rank: int, world_size: int, cases: list[EngineCase], interface: str = "") -> list[Bytes]:
    """Run each case; calls are the last step's, received bytes each step's."""
    results = []
    for case in cases:
        before = live_storages() if case.looks_for_foreign else {}
        engine, vocab = make_engine(case)
        received = []
        for _ in range(case.steps - 1):
            start = quiet_counter(interface)
            one_step(engine, vocab, rank, world_size)
            engine.settle()
            received.append(quiet_counter(interface) - start)
        engine.comm.calls.clear()
        start = quiet_counter(interface)
        one_step(engine, vocab, rank, world_size, update=False)
        held_before = engine.held_bytes()
        known = {tensor.untyped_storage().data_ptr() for _, _, tensor in engine.tensors()}
        known |= {buffer.untyped_storage().data_ptr() for buffer in engine.model.buffers()}
        foreign = foreign_bytes(known | before.keys()) if case.looks_for_foreign else 0
        engine.step()
        engine.settle()
        received.append(quiet_counter(interface) - start)
        kept = {flat.name: unit.is_kept for unit in engine.schedule.units for flat in unit.flats}
        flats = [
            FlatSize(flat.layout.padded_numel, flat.layout.shard_numel, flat.is_trainable, kept[flat.name])
            for flat in engine.flats
        ]
        calls, held_after = list(engine.comm.calls), engine.held_bytes()
        engine.close()
        results.append(Bytes(flats, calls, held_before, held_after, foreign, received))
        del engine
    return results


# -- checkpoints ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResumeCase:
    """Train from `load` (or the beginning) to step `until`, saving to `root` after each step in `save_at`."""

    config: ZeroConfig
    until: int
    root: Path
    load: Path | None = None
    save_at: tuple[int, ...] = ()
    model: str = "tied"
    seed: int = 0


@dataclass(frozen=True)
class Resumed:
    """What came of it; `refusal` is why a checkpoint was not loaded."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""


def resume(rank: int, world_size: int, cases: list[ResumeCase]) -> list[Resumed]:
    results = []
    for case in cases:
        engine, vocab = make_engine(EngineCase(case.config, case.model, seed=case.seed))
        try:
            if case.load:
                checkpoint.load(engine, case.load)
        except checkpoint.CheckpointError as error:
            results.append(Resumed(refusal=str(error)))
            engine.close()
            continue
        losses = []
        while engine.step_count < case.until:
            losses.append(one_step(engine, vocab, rank, world_size))
            if engine.step_count in case.save_at:
                checkpoint.save(engine, case.root)
        results.append(Resumed(losses, {name: t.float().numpy() for name, t in engine.full_parameters()}))
        engine.close()
    return results


# -- ends -------------------------------------------------------------------------------------------------


def die_in_backward(rank: int, world_size: int, victim: int, how: str, stage: Stage) -> str:
    """The victim leaves without a word in the middle of its second backward."""
    engine, vocab = make_engine(EngineCase(ZeroConfig(stage=stage)))

    def leave(gradient: torch.Tensor) -> None:
        if engine.step_count == 1 and rank == victim:
            if how == "raises":
                raise FloatingPointError("the victim's own error")
            os.kill(os.getpid(), signal.SIGKILL)

    blocks_of(engine.model)[0].register_forward_hook(
        lambda module, args, out: out.register_hook(leave) and None
    )
    for _ in range(3):
        one_step(engine, vocab, rank, world_size)
    return "finished"


def note_pid_and_sleep(rank: int, world_size: int, folder: Path) -> None:
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    time.sleep(600)


def add_up(rank: int, world_size: int) -> float:
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return float(total)


# -- limited memory ---------------------------------------------------------------------------------------


def seeded(name: str, tensor: torch.Tensor) -> None:
    """The same start for a parameter of this name wherever it is made."""
    if "norm" in name:
        tensor.fill_(1.0)
    else:
        tensor.normal_(0, 0.02, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def train_within(
    rank: int, world_size: int, config: ZeroConfig, budget_bytes: int, steps: int
) -> tuple[int, float, int]:
    """Train the deep example, not letting this process's data grow by more than the budget.

    Returns (bytes of model states, last loss, bytes of data used above the beginning).
    """
    with torch.device("meta"):
        model = make_model("deep")
    start = data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (start + budget_bytes, resource.RLIM_INFINITY))
    engine = ZeroEngine(model, config, blocks=blocks_of(model), initialize=seeded)
    case, loss_value, most = TrainCase(sequences=2 * world_size), 0.0, 0
    for step in range(steps):
        for tokens, labels in micro_batches(case, step, rank, world_size, 256):
            loss = engine(tokens, labels).loss
            engine.backward(loss)
            loss_value = float(loss.detach())
            most = max(most, data_bytes() - start)
        engine.step()
    states = 16 * sum(flat.layout.shard_numel for flat in engine.flats)
    engine.close()
    return states, loss_value, most


def data_bytes() -> int:
    """VmData of this process: what RLIMIT_DATA limits."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmData in /proc/self/status")


def pages_found_new(rank: int, world_size: int) -> int:
    """First touches while 32 MiB are written."""
    before = minor_faults()
    torch.ones(2**23)
    return minor_faults() - before
