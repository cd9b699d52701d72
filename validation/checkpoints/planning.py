"""Seconds that torch's planners compute for saves and loads of many ranks, on plans that are made up.

    python -m validation.checkpoints.planning --out traces/checkpoints      writes "plans" of clock.json anew

All is the processor's time of one process: what the coordinator does for all ranks, and what each rank does
with `.metadata`. Python's search for cycles takes most of it where it is on; torchtitan turns it off.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from validation.provenance import write_checksums

PLANS = ((16, 300), (64, 300), (256, 300), (64, 1200))  # ranks, items of each
_ROWS, _COLUMNS = 128, 512  # of a rank's part


def plans(core_factor: Callable[[], float] = lambda: 1.0) -> list[dict[str, Any]]:
    """The seconds of all of `PLANS`, with the search for cycles and without, over what `core_factor` says
    just before."""
    found = []
    for collects in (True, False):
        with _collection(collects):
            for ranks, items in PLANS:
                entry: dict[str, Any] = {"ranks": ranks, "items": items, "collects": collects}
                for part in (save_seconds, commit_seconds, load_seconds):
                    gc.collect()
                    factor = core_factor()
                    seconds = part(ranks, items)
                    entry |= {
                        key: value if key.endswith("_bytes") else value / factor
                        for key, value in seconds.items()
                    }
                found.append(entry)
    return found


@contextmanager
def _collection(is_on: bool) -> Iterator[None]:
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if was_on else gc.disable)()


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    found = action()
    return time.process_time() - began, found


def save_seconds(ranks: int, items: int) -> dict[str, float]:
    """The coordinator's for a save's plans, sharded: to read them (`gather_object`), to make one plan of
    them, to write the answers (`scatter_object_list`)."""
    made = [_save_plan(rank, ranks, items) for rank in range(ranks)]
    sent = [pickle.dumps(plan) for plan in made]
    read, received = _timed(lambda: [pickle.loads(one) for one in sent])
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    planned, (answers, _) = _timed(lambda: planner.create_global_plan(received))
    written, _ = _timed(lambda: [pickle.dumps(answer) for answer in answers])
    size = sum(map(len, sent)) / ranks / items
    return {"read": read, "plan": planned, "write": written, "sent_bytes": size}


def commit_seconds(ranks: int, items: int) -> dict[str, float]:
    """The coordinator's for what all ranks have written: to read where it is, and to write `.metadata`
    (filesystem.py `finish`)."""
    sent = [
        pickle.dumps([WriteResult(index, 1, place) for index, place in _places(rank, items)])
        for rank in range(ranks)
    ]
    read, received = _timed(lambda: [pickle.loads(one) for one in sent])
    metadata = _metadata(ranks, items)

    def finish() -> None:
        metadata.storage_data = {result.index: result.storage_data for one in received for result in one}
        pickle.dump(metadata, io.BytesIO())

    written, _ = _timed(finish)
    return {"results_read": read, "metadata_write": written}


def load_seconds(ranks: int, items: int) -> dict[str, float]:
    """Every rank's: to read `.metadata` and to look for its parts in it; the coordinator's: to read all
    plans, which it leaves as they are (`create_default_global_load_plan`), and to write them."""
    whole = _metadata(ranks, items)
    whole.storage_data = {index: place for rank in range(ranks) for index, place in _places(rank, items)}
    content = pickle.dumps(whole)
    del whole
    opened, metadata = _timed(lambda: pickle.loads(content))
    own = [_chunk(ranks // 2)]
    found, plan = _timed(lambda: LoadPlan([
        item for name, tensor in metadata.state_dict_metadata.items()
        for item in create_read_items_for_chunk_list(name, tensor, own)
    ]))  # fmt: skip
    sent = [pickle.dumps(plan) for _ in range(ranks)]
    read, received = _timed(lambda: [pickle.loads(one) for one in sent])
    planned, answers = _timed(lambda: DefaultLoadPlanner().create_global_plan(received))
    written, _ = _timed(lambda: [pickle.dumps(answer) for answer in answers])
    return {"metadata_read": opened, "metadata_search": found, "load_read": read, "load_plan": planned,
            "load_write": written, "metadata_bytes": len(content) / ranks / items}  # fmt: skip


def own_plan_seconds(items: int = 600) -> dict[str, float]:
    """Seconds that a rank computes for its own plans, without the others: of a save, and of a load with the
    look-up of each tensor that is read (`resolve_tensor`)."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        own = {
            name: DTensor.from_local(torch.zeros(64, 128), mesh, [Shard(0)])
            for name in map(_name, range(items))
        }
        began = time.process_time()
        saver = DefaultSavePlanner()
        saver.set_up_planner(own, None, True)
        plan = saver.create_local_plan()
        saved = time.process_time()
        _, metadata = saver.create_global_plan([plan])
        planned = time.process_time()
        loader = DefaultLoadPlanner()
        loader.set_up_planner(own, metadata, True)
        read = loader.create_local_plan()
        for item in read.items:
            loader.resolve_tensor(item).detach()
        loaded = time.process_time()
    finally:
        dist.destroy_process_group()
    return {"items": items, "save": saved - began, "load": loaded - planned}


# -- what is planned -----------------------------------------------------------------------------------


def _name(number: int) -> str:
    return f"optim.state.model.layers.{number}.self_attn.q_proj.weight.exp_avg"


def _chunk(rank: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([_ROWS * rank, 0]), torch.Size([_ROWS, _COLUMNS]))


def _paths(items: int) -> dict[str, tuple[str, ...]]:
    return {name: tuple(name.split(".")) for name in map(_name, range(items))}


def _save_plan(rank: int, ranks: int, items: int) -> SavePlan:
    properties, whole = TensorProperties(dtype=torch.float32), torch.Size([_ROWS * ranks, _COLUMNS])
    made = []
    for number in range(items):
        data = TensorWriteData(_chunk(rank), properties, whole)
        index = MetadataIndex(_name(number), data.chunk.offsets)
        made.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return SavePlan(made, planner_data=_paths(items))


def _places(rank: int, items: int) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    for number in range(items):
        index = MetadataIndex(_name(number), torch.Size([_ROWS * rank, 0]), rank)
        yield index, _StorageInfo(f"__{rank}_0.distcp", 263_000 * number, 263_000)


def _metadata(ranks: int, items: int) -> Metadata:
    whole = torch.Size([_ROWS * ranks, _COLUMNS])
    tensors: dict[str, Any] = {
        _name(number): TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), whole, [_chunk(rank) for rank in range(ranks)]
        )
        for number in range(items)
    }
    return Metadata(tensors, planner_data=_paths(items))


def put_into_clock(folder: Path, key: str, found: Any) -> None:
    """Write what was found under `key` of the folder's clock.json, whose other figures stay."""
    path = folder / "clock.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, key: found}, indent=1) + "\n")
    if folder.parent.name == "traces":
        write_checksums(folder.parent)


def main(words: list[str]) -> int:
    arguments = argparse.ArgumentParser(prog="python -m validation.checkpoints.planning", description=__doc__)
    arguments.add_argument("--out", type=Path, metavar="DIR", help="whose clock.json gets the new plans")
    options = arguments.parse_args(words)
    found = plans()
    for entry in found:
        items = entry["ranks"] * entry["items"]
        each = {key: value / items * 1e6 for key, value in entry.items() if isinstance(value, float)}
        print(entry["ranks"], entry["items"], "with" if entry["collects"] else "without", "collection:",
              ", ".join(f"{key} {value:.1f}" for key, value in each.items() if "bytes" not in key),
              "us per item")  # fmt: skip
    if options.out:
        put_into_clock(options.out, "plans", found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
