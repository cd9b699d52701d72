"""What Megatron-Core's own Muon keeps and calls in a step, on CPU ranks.

    python -m validation.megatron_muon FOLDER [LATER]

FOLDER holds Megatron-Core 0.16.1 and Emerging-Optimizers 0.1.0, as in
`pip install --target FOLDER --no-deps megatron-core==0.16.1`, and the folder `emerging_optimizers` of
NVIDIA-NeMo/Emerging-Optimizers v0.1.0. The GPT of `validation.checkpoints.megatron_core`, its DDP and its
optimizers run one step over gloo: per rank the bytes of masters and states, the products by shape, and the
collectives of the step. gloo gathers equal tensors only, so what is unequal goes by broadcasts. LATER holds
Megatron-Core 0.18.2: prints the layout of buckets that its layer-wise optimizer makes.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from validation.checkpoints.megatron_core import Case, megatron_model, no_gpu
from validation.launch import run
from validation.megatron_host import load_from

# (ranks, tensor, expert, expert_tensor, experts), whether it is layer-wise, how tensor ranks work together.
CASES: tuple[tuple[Case, bool, str], ...] = (
    ((1, 1, 1, 1, 0), False, "blockwise"), ((2, 1, 1, 1, 0), True, "blockwise"),
    ((4, 1, 1, 1, 0), True, "blockwise"), ((2, 2, 1, 1, 0), False, "blockwise"),
    ((2, 2, 1, 1, 0), False, "duplicated"), ((2, 2, 1, 1, 0), False, "distributed"),
    ((4, 2, 1, 1, 0), True, "distributed"), ((4, 1, 2, 1, 4), True, "blockwise"),
    ((2, 1, 1, 1, 4), False, "blockwise"),
)  # fmt: skip
# (elements of matrices in the order of registration, bucket size, ranks)
LAYOUTS: tuple[tuple[tuple[int, ...], int | None, int], ...] = (
    ((1000, 64, 300, 4096, 100, 8192, 64, 640), None, 2),
    ((1000, 64, 300, 4096, 100, 8192, 64, 640) * 2, 6000, 4),
    ((4096, 4096, 4096), 4096, 4),
)


def _core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


class _Products(TorchDispatchMode):
    """Counts products by (m, k, n)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name in ("aten::mm", "aten::addmm"):
            left, right = args[-2:]
            self.found[f"{left.shape[0]}x{left.shape[1]}x{right.shape[1]}"] += 1
        return func(*args, **(kwargs or {}))


class _Calls:
    """Records collectives as (kind, ranks, elements of the whole, type)."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._all_reduce, self._all_gather = dist.all_reduce, dist.all_gather
        both: Any = dist
        both.all_reduce, both.all_gather = self.all_reduce, self.all_gather

    def _note(self, kind: str, group: Any, numel: int, dtype: torch.dtype) -> None:
        self.found[f"{kind} of {dist.get_world_size(group)}: {numel} {dtype}"] += 1

    def all_reduce(self, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **keys: Any) -> Any:
        self._note("all_reduce", group, tensor.numel(), tensor.dtype)
        return self._all_reduce(tensor, op, group, **keys)

    def all_gather(self, tensors: Any, tensor: Any, group: Any = None, **keys: Any) -> Any:
        self._note("all_gather", group, sum(one.numel() for one in tensors), tensor.dtype)
        for number, one in enumerate(tensors):
            if number == dist.get_rank(group):
                one.copy_(tensor)
            if one.numel():
                dist.broadcast(one, dist.get_process_group_ranks(group)[number], group)


def step(rank: int, world_size: int, case: Case, is_layer_wise: bool, mode: str, folder: str) -> Any:
    """One step on this rank; what every rank kept and called."""
    sys.modules["emerging_optimizers.triton_kernels"] = types.ModuleType("none")  # not called here
    load_from(Path(folder))
    with no_gpu():
        mine = _step(case, is_layer_wise, mode)
    ranks: list[Any] = [None] * world_size
    dist.all_gather_object(ranks, mine)
    return ranks


def _step(case: Case, is_layer_wise: bool, mode: str) -> dict[str, Any]:
    _, tensor, expert, expert_tensor, _ = case
    _core("parallel_state").initialize_model_parallel(
        tensor_model_parallel_size=tensor, expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )  # fmt: skip
    model = megatron_model(case, is_distributed=False)
    settings = _core("optimizer").OptimizerConfig(
        optimizer="dist_muon" if is_layer_wise else "muon", lr=1e-3, bf16=True,
        params_dtype=torch.bfloat16, use_distributed_optimizer=False, muon_tp_mode=mode, clip_grad=1.0,
    )  # fmt: skip
    optimizer = _core("optimizer.muon").get_megatron_muon_optimizer(
        settings, [model], layer_wise_distributed_optimizer=is_layer_wise
    )
    for parameter in model.parameters():
        parameter.main_grad.normal_()
    calls, products = _Calls(), _Products()
    with products:
        optimizer.step()
    masters = states = 0
    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            masters += sum(parameter.numel() * parameter.element_size() for parameter in group["params"])
        for state in one.optimizer.state.values():
            tensors = (value for value in state.values() if torch.is_tensor(value) and value.dim())
            states += sum(value.numel() * value.element_size() for value in tensors)
    return {"masters": masters, "states": states, "products": products.found, "calls": calls.found}


def layouts(folder: Path) -> list[dict[str, Any]]:
    """The bounds of buckets and the place of every matrix, by 0.18.2's own code."""
    load_from(folder)
    optimizer = _core("optimizer.layer_wise_optimizer")
    found = []
    for numels, size, ranks in LAYOUTS:
        parameters = [torch.nn.Parameter(torch.empty(1, numel)) for numel in numels]
        how = types.SimpleNamespace(pad_buckets_for_high_nccl_busbw=False)
        layout = optimizer.LayerWiseDistributedOptimizer._compute_per_buffer_param_layout(
            parameters, size, ranks, how
        )
        places = [layout.param_index_map[one][:2] for one in parameters]
        found.append({"buckets": layout.bucket_indices, "places": places})
    return found


def main(words: list[str]) -> int:
    for case, is_layer_wise, mode in CASES:
        given = (case, is_layer_wise, mode, words[0])
        ranks = run("validation.megatron_muon:step", case[0], given, timeout=300)[0]
        print(json.dumps({"case": case, "layer_wise": is_layer_wise, "mode": mode, "ranks": ranks}))
    if len(words) > 1:
        for one in layouts(Path(words[1])):
            print(json.dumps(one))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
