"""Host time of Megatron-FSDP's hooks, on CPU tensors, one rank and gloo.

    python -O -m validation.fsdp_host FOLDER --blocks 6 --layers 8

FOLDER holds Megatron-Core as pip installs it (`pip install --target FOLDER --no-deps megatron-core==0.16.1`).
Blocks of so many linear layers are sharded as `optim_grads_params`; streams and events of CUDA are stand-ins
that do nothing. Prints what the main thread takes longer than for the same blocks alone, and how many
operators more (views aside), forward and backward: the quickest of 40 times five. One process times one
model.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from validation.engine_host import call_after_call
from validation.megatron_host import operators_of, quickest_seconds, stand_in_for_cuda

_WIDTH = 64


class Block(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)])

    def forward(self, rows: Tensor) -> Tensor:
        made: Tensor = self.layers(rows)
        return made


def load_from(folder: Path) -> Any:
    """Megatron-FSDP's module, with stand-ins for CUDA."""
    sys.path.insert(0, str(folder / "megatron" / "core" / "distributed" / "fsdp" / "src"))
    cuda = stand_in_for_cuda()
    cuda.current_device = cuda.memory_allocated = cuda.memory_reserved = lambda *args: 0
    cuda.empty_cache = lambda: None
    tensor: Any = Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    return importlib.import_module("megatron_fsdp.fully_shard")


def seconds_of(model: nn.Module, rows: Tensor) -> tuple[float, float]:
    """Time of the main thread, forward and backward."""
    return quickest_seconds(lambda: model(rows), time.thread_time)


def main() -> None:
    """Time it, and print."""
    arguments = argparse.ArgumentParser(prog="python -O -m validation.fsdp_host")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--blocks", type=int, default=6)
    arguments.add_argument("--layers", type=int, default=8)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    library = load_from(given.folder)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    rows = torch.randn(16, _WIDTH).bfloat16().requires_grad_()
    alone, sharded = (
        nn.Sequential(*[Block(given.layers) for _ in range(given.blocks)]).bfloat16() for _ in range(2)
    )
    sharded = library.fully_shard_model(
        sharded, device_mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), dp_shard_dim="dp",
        fsdp_unit_modules=[Block], zero_dp_strategy=3, device=torch.device("cpu"),
        check_for_nan_in_grad=False,
    )  # fmt: skip
    operators = operators_of(lambda: alone(rows)), operators_of(lambda: sharded(rows))
    counts = [more - less for less, more in zip(*operators, strict=True)]
    seconds = [b - a for a, b in zip(seconds_of(alone, rows), seconds_of(sharded, rows), strict=True)]
    print(f"nn.Linear, call after call: {call_after_call():.1f} us")
    print(
        f"{given.blocks} blocks of {given.layers}: forward {seconds[0] * 1e6:.0f} us, {counts[0]} operators; "
        f"backward {seconds[1] * 1e6:.0f} us, {counts[1]}"
    )


if __name__ == "__main__":
    main()
