"""Training that loses a rank in the middle of a save or of a step, and goes on from the last whole save when
it is started again: two rounds of `validation.launch`."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from validation.checkpoints.cases import SavedCase, saved_cases
from validation.checkpoints.ranks import states_of, train_step, trained
from validation.record.run import shape_of

MODEL = "even"
_KILLED = "killed"  # a file of the folder, once a rank was


class Killing(NamedTuple):
    """Rank 1 ends at step `step`, once: in the middle of its "save", or of the "step" itself."""

    where: str
    step: int


def kill_itself(folder: Path) -> NoReturn:
    """End this process as if its node were gone, and leave word of it for the next round."""
    (folder / _KILLED).touch()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("ended")


def last_whole(root: Path) -> int:
    """The step of the newest checkpoint that was committed; 0 without one."""
    steps = [
        int(folder.name.removeprefix("step-"))
        for folder in root.glob("step-*")
        if (folder / ".metadata").exists()
    ]
    return max(steps, default=0)


def train(
    rank: int, world_size: int, root: str, steps: int, every: int, killing: Killing | None = None
) -> dict[str, Any]:
    """Train FSDP2 from the newest whole checkpoint to `steps`, saving every so many; returns the step begun
    from, and a digest of this rank's parameters and states at the end."""
    case = next(case for case in saved_cases() if case.name == "fsdp2-dcp")
    folder, begun = Path(root), last_whole(Path(root))
    if (folder / _KILLED).exists():
        killing = None
    trainer = _restored(rank, world_size, case, folder, begun)
    for number in range(begun, steps):
        done = number + 1
        if killing == Killing("step", done) and rank == 1:
            kill_itself(folder)
        train_step(trainer, rank, world_size, number, shape_of(MODEL).vocab_size)
        if done % every == 0:
            is_killed = killing == Killing("save", done) and rank == 1
            place = folder / f"step-{done}"
            writer = KilledWriter(place, folder) if is_killed else FileSystemWriter(place)
            save(states_of(trainer), storage_writer=writer)
    digest = _digest(states_of(trainer))
    trainer.close()
    return {"begun": begun, "digest": digest}


class KilledWriter(FileSystemWriter):
    """A writer whose process ends when it has written half of its items. `root`: of all checkpoints."""

    def __init__(self, path: Path, root: Path) -> None:
        super().__init__(path)
        self.root = root

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        half = SavePlan(plan.items[: len(plan.items) // 2], plan.storage_data, plan.planner_data)
        super().write_data(half, planner)
        kill_itself(self.root)


def _restored(rank: int, world_size: int, case: SavedCase, folder: Path, begun: int) -> Any:
    trainer = trained(rank, world_size, case, MODEL, 0)
    if begun:
        states = states_of(trainer)
        load(states, checkpoint_id=folder / f"step-{begun}")
        set_model_state_dict(trainer.model, states["model"])
        set_optimizer_state_dict(trainer.model, trainer.optimizer, states["optim"])
    return trainer


def _digest(states: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for tensor in _tensors(states):
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else
                     str(float(tensor)).encode())  # fmt: skip
    return found.hexdigest()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [tensor for key in sorted(value) for tensor in _tensors(value[key])]
    if isinstance(value, torch.Tensor):
        return [value.to_local() if hasattr(value, "to_local") else value]
    return []
