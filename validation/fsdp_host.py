"""Host time of FSDP1's hooks, or of Megatron-FSDP's, on CPU tensors and one core.

    python -O -m validation.fsdp_host [FOLDER] --blocks 24 --layers 1 [--flat] [--stored bf16]

Without FOLDER torch's own FSDP1 wraps every block, beside seven ranks of a fake process group. Parameters are
bf16, stored in fp32 and with gradients reduced in fp32, or all in bf16. FOLDER holds Megatron-Core as pip
installs it (`pip install --target FOLDER --no-deps megatron-core==0.16.1`), of which Megatron-FSDP shards the
blocks as `optim_grads_params`, on one rank and gloo. Blocks have so many linear layers. Streams and events of
CUDA are stand-ins that do nothing. Prints what the main thread takes longer than for the same blocks alone,
and how many operators more (views aside), forward and backward: the quickest of 40 times five. One process
times one model.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from validation.engine_host import call_after_call
from validation.megatron_host import Nothing, operators_of, quickest_seconds, stand_in_for_cuda

_WIDTH = 64


class Block(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)])

    def forward(self, rows: Tensor) -> Tensor:
        made: Tensor = self.layers(rows)
        return made


def wrap_in_fsdp1(model: nn.Module, strategy: str, stored: str, *, is_flat: bool) -> nn.Module:
    """torch's FSDP1 around every block, with stand-ins for CUDA's streams."""
    store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    dist.init_process_group("fake", rank=0, world_size=8, store=store)
    library: Any = importlib.import_module("torch.distributed.fsdp.fully_sharded_data_parallel")
    device = torch.device("cpu")
    streams = SimpleNamespace(
        Stream=lambda *args, **kwargs: Nothing(),
        Event=lambda *args, **kwargs: Nothing(),
        current_stream=lambda *args: Nothing(),
        stream=lambda stream: contextlib.nullcontext(),
        is_available=lambda: True,
        current_device=lambda: device,
    )

    def keep_streams(state: Any, *rest: Any) -> Any:
        state._device_handle = streams
        return state

    library._init_device_handle = keep_streams
    tensor: Any = Tensor
    tensor.record_stream = lambda self, stream: None
    reduced = torch.bfloat16 if stored == "bf16" else torch.float32
    made: nn.Module = library.FullyShardedDataParallel(
        model.bfloat16() if stored == "bf16" else model,
        sharding_strategy=library.ShardingStrategy[strategy],
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block),
        mixed_precision=library.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduced),
        use_orig_params=not is_flat,
    )
    return made


def wrap_in_megatron_fsdp(model: nn.Module, folder: Path) -> Any:
    """Megatron-FSDP around every block, with stand-ins for CUDA."""
    sys.path.insert(0, str(folder / "megatron" / "core" / "distributed" / "fsdp" / "src"))
    cuda = stand_in_for_cuda()
    cuda.current_device = cuda.memory_allocated = cuda.memory_reserved = lambda *args: 0
    cuda.empty_cache = lambda: None
    tensor: Any = Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    library = importlib.import_module("megatron_fsdp.fully_shard")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    return library.fully_shard_model(
        model.bfloat16(), device_mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)),
        dp_shard_dim="dp", fsdp_unit_modules=[Block], zero_dp_strategy=3, device=torch.device("cpu"),
        check_for_nan_in_grad=False,
    )  # fmt: skip


def seconds_of(model: nn.Module, rows: Tensor) -> tuple[float, float]:
    """Time of the main thread, forward and backward."""
    return quickest_seconds(lambda: model(rows), time.thread_time)


def main() -> None:
    """Time it, and print."""
    arguments = argparse.ArgumentParser(prog="python -O -m validation.fsdp_host")
    arguments.add_argument("folder", type=Path, nargs="?")
    arguments.add_argument("--blocks", type=int, default=6)
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--strategy", default="FULL_SHARD")
    arguments.add_argument("--stored", choices=("fp32", "bf16"), default="fp32")
    arguments.add_argument("--flat", action="store_true")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    alone, blocks = (nn.Sequential(*[Block(given.layers) for _ in range(given.blocks)]) for _ in range(2))
    if given.folder is None:
        sharded: Any = wrap_in_fsdp1(blocks, given.strategy, given.stored, is_flat=given.flat)
    else:
        sharded = wrap_in_megatron_fsdp(blocks, given.folder)
    alone.bfloat16()
    rows = torch.randn(16, _WIDTH).bfloat16().requires_grad_()
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
