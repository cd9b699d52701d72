"""Seconds of real saves and loads on this machine, and its rates measured without torch's checkpoints.

    python -m validation.checkpoints.clock --out traces/checkpoints

Rates: finding the states of a parameter, copying states into new host memory, archives of torch.save's into
memory and back, torch.save into a file by name, writing and reading a file, torch's planners on plans that
are made up (`planning.py`), staging states that have hardly any bytes. Both are the processor's time of the
main thread on the slowest rank, median of the repetitions: others use this machine too, and what they take is
in the time on the clock, which stands beside. Files are in memory (tmpfs), so nothing waits for a drive.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from validation.checkpoints.__main__ import experiment
from validation.checkpoints.cases import SavedCase, saved_cases
from validation.checkpoints.planning import own_plan_seconds, plans
from validation.checkpoints.ranks import FILES, states_of, trained, write
from validation.launch import run
from validation.provenance import provenance, write_checksums
from validation.record.cases import SHAPES

MODEL, RANKS, REPETITIONS = "large", 2, 5
CASES = ("fsdp2-dcp", "fsdp2-async", "ddp-full", "deepspeed1-bf16", "deepspeed3-bf16")


class Seconds(NamedTuple):
    """Of one repetition on the slowest rank: on the clock, and of the main thread's processor."""

    clock: float
    processor: float


def timed(action: Callable[[], Any]) -> Seconds:
    """Run it on all ranks at once."""
    dist.barrier()
    began, worked = time.perf_counter(), time.thread_time()
    action()
    found = torch.tensor([time.perf_counter() - began, time.thread_time() - worked])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return Seconds(*found.tolist())


def middle(found: list[Seconds]) -> Seconds:
    """The median of all but the first."""
    return Seconds(*(statistics.median(values) for values in zip(*found[1:], strict=True)))


def median(action: Callable[[int], Any]) -> float:
    """Processor seconds, the median of the repetitions."""
    return middle([timed(lambda n=number: action(n)) for number in range(REPETITIONS + 1)]).processor  # type: ignore[misc]


def measured(rank: int, world_size: int, case: SavedCase, root: str) -> tuple[dict[str, float], ...]:
    """(seconds of a case's saves, rates of the machine just before)."""
    beside = rates(rank, world_size, root)
    return saves(rank, world_size, case, root), beside


# -- saves ---------------------------------------------------------------------------------------------


def saves(rank: int, world_size: int, case: SavedCase, root: str) -> dict[str, float]:
    """Seconds of saving a case: of what blocks, and of loading DCP's."""
    trainer = trained(rank, world_size, case, MODEL, 1)
    folder = Path(root) / case.name
    group = dist.new_group(backend="gloo")  # of the writing thread's own, as torchtitan gives it
    found: list[Seconds] = []
    responses: list[Any] = []
    for number in range(REPETITIONS + 1):
        path = folder / f"{number}"
        if case.checkpoint.get("mode") == "async":
            found.append(timed(lambda p=path: responses.append(_begin(trainer, p / FILES, group))))  # type: ignore[misc]
            responses[-1].result()
        else:
            found.append(timed(lambda p=path: write(trainer, case, p)))  # type: ignore[misc]
        if number < REPETITIONS:
            _drop(path, rank)
    seconds = middle(found)
    result = {"blocking_processor": seconds.processor, "blocking": seconds.clock}
    if case.name == "fsdp2-dcp":
        last = folder / f"{REPETITIONS}" / FILES
        result["load_processor"] = median(lambda _: load(states_of(trainer), checkpoint_id=last))
    trainer.close()
    return result


def _begin(trainer: Any, folder: Path, group: Any) -> Any:
    response = async_save(states_of(trainer), checkpoint_id=folder, process_group=group)
    assert not isinstance(response, AsyncSaveResponse)
    return response


def _drop(folder: Path, rank: int) -> None:
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


# -- rates ---------------------------------------------------------------------------------------------

CHUNKS, CHUNK_ELEMENTS = 24, 2**20  # of each rank: 24 tensors of 4 MiB


def rates(rank: int, world_size: int, root: str) -> dict[str, float]:
    """Bytes per second of each rank while all do the same, and seconds of small things."""
    tensors = [torch.rand(CHUNK_ELEMENTS) for _ in range(CHUNKS)]
    size = CHUNKS * CHUNK_ELEMENTS * 4
    path = Path(root) / f"raw-{rank}"
    content = [tensor.numpy().tobytes() for tensor in tensors]

    def archives() -> None:
        for tensor in tensors:
            torch.save(tensor, io.BytesIO())

    def put() -> None:
        with open(path, "wb") as file:
            for part in content:
                file.write(part)

    def get() -> None:
        with open(path, "rb") as file:
            while file.read(1 << 22):
                pass

    def load_archives() -> None:
        for buffer in buffers:
            buffer.seek(0)
            torch.load(buffer, weights_only=True)

    buffers = []
    for tensor in tensors:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        buffers.append(buffer)
    small = torch.zeros(1)
    by_name = {case.name: case for case in saved_cases()}
    trainer = trained(rank, world_size, by_name["fsdp2-dcp"], "even", 1)
    parameters = len(list(trainer.model.parameters()))
    return {
        "state_dict_seconds": median(lambda _: states_of(trainer)) / parameters,
        "staging_seconds": _staging_seconds(states_of(trainer), 4 * parameters),
        "file_bytes_per_second": size / median(lambda _: torch.save(tensors, path)),
        "copy_bytes_per_second": size / median(lambda _: [tensor.clone() for tensor in tensors]),
        "archive_bytes_per_second": size / median(lambda _: archives()),
        "unarchive_bytes_per_second": size / median(lambda _: load_archives()),
        "write_bytes_per_second": size / median(lambda _: put()),
        "read_bytes_per_second": size / median(lambda _: get()),
        "archive_seconds": median(lambda _: archive(small)) / 300,
        "unarchive_seconds": median(lambda _: unarchive(small)) / 300,
    }


def _staging_seconds(states: dict[str, Any], tensors: int) -> float:
    """Seconds per tensor of torch's blocking stager, for states so small that their bytes take none."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    seconds = median(lambda _: stager.stage(states))
    stager.close()
    return seconds / tensors


def archive(tensor: torch.Tensor) -> None:
    """Make an archive of a tensor 300 times."""
    for _ in range(300):
        torch.save(tensor, io.BytesIO())


def unarchive(tensor: torch.Tensor) -> None:
    """Read an archive of a tensor 300 times."""
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    for _ in range(300):
        buffer.seek(0)
        torch.load(buffer, weights_only=True)


# -- the file ------------------------------------------------------------------------------------------


def main(words: list[str]) -> int:
    arguments = argparse.ArgumentParser(prog="python -m validation.checkpoints.clock", description=__doc__)
    arguments.add_argument("--out", type=Path, metavar="DIR", help="write clock.json here")
    arguments.add_argument(
        "--folder", default="/dev/shm", metavar="DIR", help="save here; default %(default)s"
    )
    options = arguments.parse_args(words)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    by_name = {case.name: case for case in saved_cases()}
    found: dict[str, Any] = {
        "format": 1,
        "provenance": provenance("python -m validation.checkpoints.clock", backend="gloo", seed=0),
        "models": {MODEL: SHAPES[MODEL]},
        "plans": plans(),
        "own_plans": [own_plan_seconds() for _ in range(REPETITIONS)],
    }
    with tempfile.TemporaryDirectory(prefix="zsim-saves-", dir=options.folder) as root:
        found["saves"] = {}
        for name in CASES:
            case = by_name[name]
            seconds, beside = run("validation.checkpoints.clock:measured", RANKS, (case, root), timeout=600)[
                0
            ]
            entry = {"experiment": experiment(case, MODEL, RANKS), "checkpoint": case.checkpoint}
            found["saves"][name] = {**entry, "seconds": seconds, "rates": beside}
            print(name, seconds, beside, flush=True)
            shutil.rmtree(Path(root) / name, ignore_errors=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "clock.json").write_text(json.dumps(found, indent=1) + "\n")
        if options.out.parent.name == "traces":
            write_checksums(options.out.parent)
    else:
        print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
