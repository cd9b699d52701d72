"""Save and resume sharded training: each rank writes its shards, and any number of ranks can read them.

    root/step-00000020/
        manifest.json          written last: step, layouts, scaler, and size and SHA-256 of every other file
        buffers.pt  rank0.pt   the model's buffers; each rank's random state
        UNIT/...               torch.distributed.checkpoint of one flat tensor: master weights, moments

A flat tensor is saved without its padding, as one long tensor of which ranks hold chunks, so another number
of ranks, or another stage, just cuts it differently.

# [Note: a checkpoint is whole or absent] Everything is written into a folder with a temporary name, which is
renamed when the manifest is on disk. A crash leaves the temporary name; a file damaged later does not match
the manifest, and loading refuses it by name. Older checkpoints are deleted only after the new one has its
final name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from validation.zero.flat import Flat
from validation.zero.places import States

if TYPE_CHECKING:
    from validation.zero.engine import ZeroEngine

FORMAT = 1
MANIFEST = "manifest.json"


class CheckpointError(Exception):
    """A checkpoint is damaged, incomplete, or of another model."""


# -- saving ------------------------------------------------------------------------------------------


def save(engine: ZeroEngine, root: Path, keep: int = 2) -> Path:
    """Write a checkpoint of the engine's step and keep the newest `keep`; a collective call."""
    final = root / f"step-{engine.step_count:08d}"
    partial = root / f".partial-{engine.step_count:08d}"
    engine.settle()
    if engine.comm.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(engine.comm.group)
    mesh = DeviceMesh.from_group(engine.comm.group, engine.device.type)
    for flat in engine.flats:
        tensors = {key: _as_chunk(flat, part, mesh) for key, part in _parts(engine, flat).items()}
        state_dict_saver.save(tensors, checkpoint_id=partial / flat.name, process_group=engine.comm.group)
    torch.save(_random_states(engine), partial / f"rank{engine.comm.rank}.pt")
    if engine.comm.rank == 0:
        torch.save(dict(engine.model.named_buffers()), partial / "buffers.pt")
    dist.barrier(engine.comm.group)
    if engine.comm.rank == 0:
        _write_manifest(engine, partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync_folder(root)
        for old in sorted(root.glob("step-*"))[:-keep]:
            shutil.rmtree(old)
    dist.barrier(engine.comm.group)
    return final


def _parts(engine: ZeroEngine, flat: Flat) -> dict[str, Tensor]:
    """This rank's part of a flat tensor by name: its states, or frozen parameters; in stage 0 the whole
    tensor's, else the shard's."""
    if flat.is_trainable:
        return engine.states.read(flat.name)._asdict()
    held = flat.full[flat.owned] if flat.keeper is None else flat.keeper.take(flat.name)
    return {"frozen": held}


def _as_chunk(flat: Flat, part: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's chunk of the flat tensor without padding."""
    rank = flat.comm.rank
    if part.numel() != flat.layout.shard_numel:  # stage 0 holds the whole tensor
        part = part[flat.shard]
    local = part[: flat.layout.filled(rank)]
    shape = torch.Size([flat.layout.numel])
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))


def _write_manifest(engine: ZeroEngine, folder: Path) -> None:
    files = {
        path.relative_to(folder).as_posix(): [path.stat().st_size, _digest(path)]
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {
        "format": FORMAT,
        "step": engine.step_count,
        "world_size": engine.comm.world_size,
        "scaler": engine.scaler.state(),
        "layouts": _layouts(engine),
        "files": files,
    }
    with open(folder / MANIFEST, "w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _layouts(engine: ZeroEngine) -> dict[str, Any]:
    return {flat.name: [[slot.name, list(slot.shape)] for slot in flat.layout.slots] for flat in engine.flats}


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# -- loading -----------------------------------------------------------------------------------------


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of an intact checkpoint. Raises CheckpointError that names what is wrong."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder}: has no {MANIFEST}; it was never finished")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        files = manifest["files"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: is damaged ({error})") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {manifest.get('format')}, expected {FORMAT}")
    for name, (size, digest) in files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file}: has {file.stat().st_size} bytes, expected {size}")
        if _digest(file) != digest:
            raise CheckpointError(f"{file}: its content has changed since it was written")
    return manifest


def newest_intact(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that can be loaded, and the reasons why newer ones cannot."""
    refused = []
    for folder in sorted(root.glob("step-*"), reverse=True):
        try:
            verify(folder)
        except CheckpointError as error:
            refused.append(str(error))
        else:
            return folder, refused
    return None, refused


def load(engine: ZeroEngine, folder: Path) -> None:
    """Resume from a checkpoint, on any number of ranks and with any stage; a collective call.

    Raises CheckpointError on every rank, before anything is changed, if it is damaged or of another model.
    """
    manifest = _verify_together(engine, folder)
    expected = _layouts(engine)
    if manifest["layouts"] != expected:
        differing = sorted(
            name
            for name in {*manifest["layouts"], *expected}
            if manifest["layouts"].get(name) != expected.get(name)
        )
        raise CheckpointError(f"{folder}: is of another model or other blocks; they differ in {differing}")
    engine.settle()
    mesh = DeviceMesh.from_group(engine.comm.group, engine.device.type)
    for flat in engine.flats:
        _load_flat(engine, flat, folder / flat.name, mesh)
    buffers = torch.load(folder / "buffers.pt", weights_only=True)
    for name, buffer in engine.model.named_buffers():
        buffer.copy_(buffers[name])
    own = folder / f"rank{engine.comm.rank}.pt"
    if manifest["world_size"] == engine.comm.world_size:
        on_host, *on_device = torch.load(own, weights_only=True)
        torch.set_rng_state(on_host)
        for state in on_device:
            torch.cuda.set_rng_state(state, engine.device)
    engine.step_count = manifest["step"]
    engine.scaler.load(manifest["scaler"])


def _random_states(engine: ZeroEngine) -> list[Tensor]:
    """The states of the host's random generator, and of the device's if it has one."""
    has_own = engine.device.type == "cuda"
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(engine.device)] if has_own else [])]


def _verify_together(engine: ZeroEngine, folder: Path) -> dict[str, Any]:
    """Rank 0 reads and verifies the checkpoint; all ranks get the outcome."""
    outcome: list[Any] = [None, None]
    if engine.comm.rank == 0:
        try:
            outcome[0] = verify(folder)
        except CheckpointError as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, group_src=0, group=engine.comm.group)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1])
    manifest: dict[str, Any] = outcome[0]
    return manifest


def _load_flat(engine: ZeroEngine, flat: Flat, folder: Path, mesh: DeviceMesh) -> None:
    layout = flat.layout
    dtype = torch.float32 if flat.is_trainable else engine.config.compute_dtype
    keys = States._fields if flat.is_trainable else ("frozen",)
    shards = {key: torch.zeros(layout.shard_numel, dtype=dtype, device=engine.device) for key in keys}
    chunks = {key: _as_chunk(flat, shard, mesh) for key, shard in shards.items()}
    state_dict_loader.load(chunks, checkpoint_id=folder, process_group=engine.comm.group)
    if flat.is_trainable:
        states = States(*(_whole(flat, shard) for shard in shards.values()))
        engine.states.write(flat.name, States(*(state.to("cpu") for state in states)))
        flat.pending = flat.publish(states.master)
        flat.finish_gather()
    elif flat.keeper is not None:
        flat.keeper.put(flat.name, shards["frozen"])
    else:
        padded = shards["frozen"].new_empty(layout.padded_numel)
        engine.comm.all_gather(padded, shards["frozen"], flat.name).wait()
        flat.full.copy_(padded)


def _whole(flat: Flat, shard: Tensor) -> Tensor:
    """The part of the states that this rank updates; in stage 0 that of all ranks."""
    if flat.config.stage:
        return shard
    full = shard.new_empty(flat.layout.padded_numel)
    flat.comm.all_gather(full, shard, flat.name).wait()
    return full
