"""One stage of torch's pipelines on a fake group of eight CPU ranks: two forwards, then two backwards.

Run as a script; prints JSON: the actions that torch's schedule makes of them, and for FSDP2 (by
`reshard_after_forward`) and DDP every collective of the second step as [action, kind, bytes]. The actions are
run as `_PipelineScheduleRuntime` does, by the stage's own methods. The model is the toy transformer.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining.schedules import _Action, _add_reduce_grad, _add_unshard_reshard
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.plan.run_torch import RANKS, TOKENS, Model
from validation.collective_log import CollectiveLog

ORDER = ("0F0", "0F1", "0B0", "0B1")
BUCKET_MB = 0.01


def lowered() -> list[str]:
    """The order with UNSHARD, RESHARD and REDUCE_GRAD, as torch's schedule puts them in."""
    compute = [_Action.from_str(text) for text in ORDER]
    return [str(action) for action in _add_reduce_grad(list(_add_unshard_reshard(compute)), 2)]


def run_step(model: torch.nn.Module, actions: list[str], buckets: list[int]) -> list[tuple[str, str, int]]:
    """`buckets`: where DDP's hook, which stands for its all-reduce, puts down their bytes."""
    stage: Any = SimpleNamespace(submod=model, log_prefix="")
    calls: list[tuple[str, str, int]] = []
    losses: dict[int, torch.Tensor] = {}
    handles: list[Any] = []
    for text in actions:
        action = _Action.from_str(text)
        kind, number = action.computation_type.value, action.microbatch_index
        with CollectiveLog() as log:
            if kind == "UNSHARD":
                modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
                handles = [module.unshard(async_op=True) for module in modules]
            elif kind == "RESHARD":
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()
            elif kind == "REDUCE_GRAD":
                _PipelineStageBase.perform_reduce_grad(stage, 1)
            elif kind == "F":
                for handle in handles:
                    handle.wait()
                handles = []
                losses[number] = _PipelineStageBase.forward_maybe_with_nosync(stage, TOKENS)
            else:
                arguments = {"stage_output": losses[number], "output_grads": None, "input_values": [TOKENS]}
                last = text == ORDER[-1]
                _PipelineStageBase.backward_maybe_with_nosync(stage, "full", arguments, last_backward=last)
        calls += [(text, call.kind, call.bytes) for call in log.calls]
        calls += [(text, "all_reduce", size) for size in buckets]
        buckets.clear()
    model.zero_grad(set_to_none=False)
    return calls


def fsdp2(reshards: bool) -> list[tuple[str, str, int]]:
    model = Model(4)
    for block in model.model.layers:
        fully_shard(block, reshard_after_forward=reshards)
    fully_shard(model, reshard_after_forward=False)
    run_step(model, lowered(), [])
    return run_step(model, lowered(), [])


def ddp() -> list[tuple[str, str, int]]:
    buckets: list[int] = []

    def hook(_state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
        buckets.append(bucket.buffer().numel() * 4)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = DistributedDataParallel(Model(4), bucket_cap_mb=BUCKET_MB)
    model.register_comm_hook(None, hook)
    for _ in range(2):  # buckets are made anew, in the order of gradients, after the first
        run_step(model, list(ORDER), buckets)
    return run_step(model, list(ORDER), buckets)


if __name__ == "__main__":
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    sharded = {str(reshards): fsdp2(reshards) for reshards in (True, False)}
    print(json.dumps({"actions": lowered(), "fsdp2": sharded, "ddp": ddp()}))
