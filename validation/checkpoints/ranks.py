"""Save on this rank."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from validation.backends import Optimization, Strategy, Trainer, make_trainer
from validation.checkpoints.cases import SavedCase
from validation.examples import blocks_of, make_batch
from validation.llama import Llama
from validation.record.run import shape_of
from validation.zero import checkpoint as engine_checkpoint

STEPS = 2
FILES = "files"


def save_all(rank: int, world_size: int, cases: list[tuple[SavedCase, str]], root: str) -> None:
    """Save every configuration into a folder of its own."""
    for case, model in cases:
        save_one(rank, world_size, case, model, Path(root) / f"{case.name}-{model}")


def save_one(rank: int, world_size: int, case: SavedCase, model_name: str, folder: Path) -> None:
    """Train two steps and save into `folder`."""
    trainer = trained(rank, world_size, case, model_name, STEPS)
    write(trainer, case, folder)
    trainer.close()
    dist.barrier()


def trained(rank: int, world_size: int, case: SavedCase, model_name: str, steps: int) -> Any:
    """The trainer of a case after so many steps."""
    torch.manual_seed(0)
    if case.backend == "experts":
        from validation.checkpoints.spread_experts import ExpertsTrainer

        return ExpertsTrainer(model_name, **case.options)
    shape = shape_of(model_name)
    model = Llama(shape)
    if case.backend == "tensor":
        return TensorTrainer(model, **case.options)
    trainer = make_trainer(Strategy(case.backend, dict(case.options)), model, Optimization())
    for number in range(steps):
        train_step(trainer, rank, world_size, number, shape.vocab_size)
    return trainer


def train_step(trainer: Trainer, rank: int, world_size: int, number: int, vocab_size: int) -> None:
    """One step on this rank's part of a batch."""
    tokens, labels = make_batch(number, 2 * world_size, 64, vocab_size)
    mine = slice(2 * rank, 2 * rank + 2)
    trainer.step([(tokens[mine], labels[mine])])


class TensorTrainer:
    """FSDP2 over tensor parallelism as torchtitan cuts its Llama; the optimizer has stepped, with gradients
    of zero."""

    def __init__(self, model: nn.Module, tensor: int) -> None:
        shape = (dist.get_world_size() // tensor, tensor)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "tensor"))
        column, row = ColwiseParallel, RowwiseParallel
        plan = {
            "model.embed_tokens": row(input_layouts=None, output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "lm_head": column(),
        }
        for number in range(len(blocks_of(model))):
            prefix = f"model.layers.{number}"
            plan |= {f"{prefix}.self_attn.{name}_proj": column() for name in "qkv"}
            plan |= {f"{prefix}.mlp.{name}_proj": column() for name in ("gate", "up")}
            plan |= {f"{prefix}.self_attn.o_proj": row(), f"{prefix}.mlp.down_proj": row()}
            plan |= {
                f"{prefix}.{name}": SequenceParallel()
                for name in ("input_layernorm", "post_attention_layernorm")
            }
        parallelize_module(model, mesh["tensor"], plan)
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def close(self) -> None:
        del self.model, self.optimizer


def write(trainer: Any, case: SavedCase, folder: Path) -> None:
    """Save the trainer's states as the case says."""
    how = dict(case.checkpoint)
    kind = how.pop("format")
    if kind == "deepspeed":
        trainer.model.save_checkpoint(str(folder), tag=FILES)
        if how.get("saves_16bit_model"):
            trainer.model.save_16bit_model(str(folder / FILES))
    elif kind == "universal":
        write_universal(trainer, folder)
    elif kind == "reference":
        engine_checkpoint.save(trainer.engine, folder)
    elif kind == "full":
        write_full(trainer, folder)
    else:
        write_dcp(trainer, folder / FILES, **how)


def write_universal(trainer: Any, folder: Path) -> None:
    """Save as DeepSpeed does, and convert on rank 0; only what the converter wrote is left."""
    trainer.model.save_checkpoint(str(folder), tag="saved")
    if dist.get_rank() == 0:
        from deepspeed.checkpoint.ds_to_universal import main

        main(
            Namespace(
                input_folder=str(folder / "saved"), output_folder=str(folder / FILES), num_extract_workers=1,
                num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
            )
        )  # fmt: skip
        shutil.rmtree(folder / "saved")
    dist.barrier()


def states_of(trainer: Any, **options: Any) -> dict[str, Any]:
    """{"model", "optim"} by torch's own getters."""
    chosen = StateDictOptions(**options)
    return {
        "model": get_model_state_dict(trainer.model, options=chosen),
        "optim": get_optimizer_state_dict(trainer.model, trainer.optimizer, options=chosen),
    }


def write_full(trainer: Any, folder: Path) -> None:
    """Gather to rank 0 and torch.save there."""
    states = states_of(trainer, full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        (folder / FILES).mkdir(parents=True)
        torch.save(states, folder / FILES / "checkpoint.pt")
    dist.barrier()


def write_dcp(
    trainer: Any, folder: Path, mode: str = "sync", threads: int = 1, single_file_per_rank: bool = True
) -> None:
    """Save by torch.distributed.checkpoint."""
    writer = FileSystemWriter(folder, thread_count=threads, single_file_per_rank=single_file_per_rank)
    states = states_of(trainer)
    if mode == "async":
        response = async_save(states, checkpoint_id=folder)
        assert not isinstance(response, AsyncSaveResponse)  # the default stager blocks
        response.result()
    else:
        save(states, storage_writer=writer)
