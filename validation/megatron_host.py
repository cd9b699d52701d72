"""Host time of Megatron-Core's router and all-to-all dispatcher, on CPU tensors of few tokens.

    python -m validation.megatron_host FOLDER [--experts 8] [--top-k 2]

FOLDER holds Megatron-Core as pip installs it (`pip install --target FOLDER --no-deps megatron-core==0.16.1`).
One rank has all experts; streams and events of CUDA are stand-ins that do nothing. Prints processor time and
operators (views aside) forward and backward, with and without torch's deterministic algorithms: the quickest
of 40 times ten. An operator on a CPU tensor of 16 tokens takes about as long as its launch would.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_TOKENS, _HIDDEN, _TIMES, _EACH = 16, 64, 40, 10


class Nothing:
    """A stream or an event."""

    def __getattr__(self, name: str) -> Callable[..., Nothing]:
        return lambda *args, **kwargs: self


def stand_in_for_cuda() -> Any:
    """torch.cuda, whose streams and events do nothing from now on."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.current_stream = cuda.Event = lambda *args, **kwargs: Nothing()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.is_available = lambda: False
    cuda.synchronize = lambda *args: None
    return cuda


def load_from(folder: Path) -> None:
    """Let Megatron-Core be imported from a folder, with stand-ins that do nothing for CUDA."""
    sys.path.insert(0, str(folder))
    stand_in_for_cuda().current_device = lambda: torch.device("cpu")


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def layer(folder: Path, num_experts: int, top_k: int) -> Callable[[], torch.Tensor]:
    """Forward of routing, dispatch, the scores' product, and return."""
    load_from(folder)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    importlib.import_module("megatron.core.parallel_state").initialize_model_parallel(1, 1)
    root = "megatron.core.transformer"
    utilities: Any = importlib.import_module(f"{root}.moe.moe_utils")
    utilities.te_general_gemm = None  # its import fails silently without Transformer Engine
    config = importlib.import_module(f"{root}.transformer_config").TransformerConfig(
        num_layers=1, hidden_size=_HIDDEN, num_attention_heads=4, num_moe_experts=num_experts,
        moe_router_topk=top_k, moe_ffn_hidden_size=32, moe_aux_loss_coeff=1e-3, moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss", moe_token_dispatcher_type="alltoall",
        add_bias_linear=False, gated_linear_unit=True, bf16=True, params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
    )  # fmt: skip
    groups = utilities.get_default_pg_collection()
    router = importlib.import_module(f"{root}.moe.router").TopKRouter(config, groups)
    router.weight.data = torch.randn(num_experts, _HIDDEN).bfloat16()
    router.set_layer_number(1)
    kind = importlib.import_module(f"{root}.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
    dispatcher = kind(num_experts, list(range(num_experts)), config, groups)
    tokens = torch.randn(_TOKENS, 1, _HIDDEN).bfloat16().requires_grad_()

    def forward() -> torch.Tensor:
        scores, chosen = router(tokens)
        rows, scores = dispatcher.dispatch_preprocess(tokens * 1, chosen, scores)
        rows, scores = dispatcher.token_dispatch(rows, scores)
        rows, _, scores = dispatcher.dispatch_postprocess(rows, scores)
        rows = dispatcher.combine_preprocess(rows * scores.unsqueeze(-1).to(rows.dtype))
        made: torch.Tensor = dispatcher.combine_postprocess(dispatcher.token_combine(rows))
        return made

    return forward


def quickest_seconds(
    forward: Callable[[], torch.Tensor], clock: Callable[[], float] = time.process_time
) -> tuple[float, float]:
    """Processor time of a forward and of its backward, that of a sum included: the quickest of `_TIMES` times
    `_EACH`. `clock`: whose time counts, by default that of all threads."""
    found: list[tuple[float, float]] = []
    for _ in range(_TIMES):
        spent = [0.0, 0.0]
        for _ in range(_EACH):
            first = clock()
            made = forward()
            second = clock()
            made.sum().backward()
            spent[0] += second - first
            spent[1] += clock() - second
        found.append((spent[0] / _EACH, spent[1] / _EACH))
    forwards, backwards = zip(*found, strict=True)
    return min(forwards), min(backwards)


def operators_of(forward: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """Operators of a forward and of its backward, that of a sum included."""
    with Operators() as both:
        made = forward()
        count = both.count
        made.sum().backward()
    return count, both.count - count


def main() -> None:
    """Time it, and print."""
    arguments = argparse.ArgumentParser(prog="python -m validation.megatron_host")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--experts", type=int, default=8)
    arguments.add_argument("--top-k", type=int, default=2)
    given = arguments.parse_args()
    forward = layer(given.folder, given.experts, given.top_k)
    for is_deterministic in (False, True):
        torch.use_deterministic_algorithms(is_deterministic)
        quickest = [seconds * 1e3 for seconds in quickest_seconds(forward)]
        counts = operators_of(forward)
        print(
            f"deterministic {is_deterministic}: forward {quickest[0]:.2f} ms, {counts[0]} operators; "
            f"backward {quickest[1]:.2f} ms, {counts[1]}"
        )


if __name__ == "__main__":
    main()
