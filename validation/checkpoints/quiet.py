"""Rates of the reference machine's host for saves and loads, with nothing beside them.

    python -m validation.checkpoints.quiet --out traces/checkpoints      writes "quiet" of clock.json anew

One process, with real-time priority where the system gives it, so that others' work neither takes the
processor nor empties its caches. A virtual core's own speed changes within minutes, so everything is timed in
calls of a small nn.Linear just before it, and given as the processor's seconds on the core of
`zsim/presets/frameworks.toml`, where such a call takes 6 us: medians of the repetitions.

`interpreter`: how long a step of an FSDP2 model without arithmetic worth the name takes while a thread of the
same process computes in Python, over its operators: on the clock, since a thread that waits computes nothing.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from validation.checkpoints.cases import saved_cases
from validation.checkpoints.planning import own_plan_seconds, plans, put_into_clock, save_seconds
from validation.checkpoints.ranks import states_of, trained
from validation.examples import blocks_of, make_batch
from validation.llama import Llama
from validation.megatron_host import Operators
from validation.record.run import shape_of

REPETITIONS = 12
_CHUNKS, _ELEMENTS = 24, 2**20  # 24 tensors of 4 MiB
_CALLS, _REFERENCE_CALL = 1000, 6e-6
_LINEAR, _ROW = nn.Linear(16, 16), torch.zeros(1, 16)


def core_factor() -> float:
    """How much slower than the reference core this one is now."""
    with torch.no_grad():
        began = time.thread_time()
        for _ in range(_CALLS):
            _LINEAR(_ROW)
        return (time.thread_time() - began) / _CALLS / _REFERENCE_CALL


def usual(action: Callable[[], Any], repetitions: int = REPETITIONS) -> float:
    """Processor seconds on the reference core."""
    found = []
    for _ in range(repetitions):
        factor = core_factor()
        began = time.thread_time()
        action()
        found.append((time.thread_time() - began) / factor)
    return statistics.median(found)


def measured() -> dict[str, Any]:
    """All rates."""
    torch.set_num_threads(1)
    has_priority = _prefer()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        found: dict[str, Any] = {"has_priority": has_priority, **_small(), **_bytes(Path(folder) / "raw")}
    found["own_load_plan_seconds"] = _own_plan()
    found["interpreter"] = _interpreter()
    found["plans"] = plans(core_factor)
    return found


def _prefer() -> bool:
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    return True


def _own_plan() -> float:
    """Seconds of an item."""
    found = []
    for _ in range(REPETITIONS):
        factor, one = core_factor(), own_plan_seconds()
        found.append(one["load"] / one["items"] / factor)
    return statistics.median(found)


# -- states and archives -------------------------------------------------------------------------------


def _small() -> dict[str, float]:
    """Seconds of things that bytes do not matter for."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        case = {one.name: one for one in saved_cases()}["fsdp2-dcp"]
        trainer = trained(0, 2, case, "even", 1)
        parameters = len(list(trainer.model.parameters()))
        states = states_of(trainer)
        stager = DefaultStager(StagingOptions(False, False, False, False))
        found = {
            "state_dict_seconds": usual(lambda: states_of(trainer)) / parameters,
            "staging_seconds": usual(lambda: stager.stage(states)) / (4 * parameters),
        }
        stager.close()
        trainer.close()
    finally:
        dist.destroy_process_group()
    return found


def _bytes(path: Path) -> dict[str, float]:
    """Bytes per second of copies and archives, and seconds of an archive of nothing."""
    tensors = [torch.rand(_ELEMENTS) for _ in range(_CHUNKS)]
    size = _CHUNKS * _ELEMENTS * 4
    nothing = [torch.zeros(1)] * 300
    whole, empty = _archives(tensors), _archives(nothing)
    return {
        "copy_bytes_per_second": size / usual(lambda: [tensor.clone() for tensor in tensors]),
        "archive_bytes_per_second": size / usual(lambda: _archives(tensors)),
        "unarchive_bytes_per_second": size / usual(lambda: _unarchive(whole)),
        "file_bytes_per_second": size / usual(lambda: torch.save(tensors, path)),
        "archive_seconds": usual(lambda: _archives(nothing)) / len(nothing),
        "unarchive_seconds": usual(lambda: _unarchive(empty)) / len(nothing),
    }


def _archives(tensors: list[torch.Tensor]) -> list[io.BytesIO]:
    buffers = [io.BytesIO() for _ in tensors]
    for tensor, buffer in zip(tensors, buffers, strict=True):
        torch.save(tensor, buffer)
    return buffers


def _unarchive(buffers: list[io.BytesIO]) -> None:
    for buffer in buffers:
        buffer.seek(0)
        torch.load(buffer, weights_only=True)


# -- one interpreter -----------------------------------------------------------------------------------


def _interpreter() -> dict[str, float]:
    """Seconds of a step alone, and beside a thread that plans a save for 64 ranks or makes archives."""
    dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    try:
        step = _step()
        operators = Operators()
        with operators:
            step()
        tensors = [torch.rand(_ELEMENTS) for _ in range(_CHUNKS)]
        works = {"planning": lambda: save_seconds(64, 300), "archiving": lambda: _archives(tensors)}
        alone = statistics.median(_seconds(step) for _ in range(20))
        beside = {name: _beside(step, work) for name, work in works.items()}
    finally:
        dist.destroy_process_group()
    return {"operators": operators.count, "alone": alone, **beside}


def _step() -> Callable[[], None]:
    """A step of FSDP2 as torchtitan takes it, on tokens that hardly compute."""
    shape = shape_of("even")
    model, mesh = Llama(shape), init_device_mesh("cpu", (64,))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens, labels = make_batch(0, 1, 4, shape.vocab_size)

    def step() -> None:
        model(tokens, labels).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    return step


def _seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _beside(step: Callable[[], None], work: Callable[[], Any], steps: int = 4) -> float:
    """Seconds of a step while a thread works, without Python's search for cycles."""
    is_over = threading.Event()

    def keep_working() -> None:
        while not is_over.is_set():
            work()

    gc.disable()
    writer = threading.Thread(target=keep_working)
    writer.start()
    try:
        step()
        return statistics.median(_seconds(step) for _ in range(steps))
    finally:
        is_over.set()
        writer.join()
        gc.enable()


# -- the file ------------------------------------------------------------------------------------------


def main(words: list[str]) -> int:
    arguments = argparse.ArgumentParser(prog="python -m validation.checkpoints.quiet", description=__doc__)
    arguments.add_argument("--out", type=Path, metavar="DIR", help="whose clock.json gets the new rates")
    options = arguments.parse_args(words)
    found = measured()
    rates = {key: value for key, value in found.items() if key != "plans"}
    print(json.dumps(rates, indent=1))
    for entry in found["plans"]:
        items = entry["ranks"] * entry["items"]
        print(
            {key: round(value / items * 1e6, 1) for key, value in entry.items() if isinstance(value, float)}
        )
    if options.out:
        put_into_clock(options.out, "quiet", found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
