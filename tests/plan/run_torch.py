"""torch's own FSDP1 and DDP on a fake process group of eight CPU ranks: what they issue, in order.

Run as a script with a JSON list of questions; prints a JSON list of answers. The model is the toy transformer
of conftest.py. An FSDP1 answer is the fourth step's calls: "AG unit", "RS unit", "AR unit", and "limit unit"
where the rate limiter waited for a unit that was freed in this step. A DDP answer is the third step's buckets
in elements.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    _flat_param,
    _limiter_utils,
    _runtime_utils,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

RANKS, WIDTH, VOCAB = 8, 16, 100


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.qkv(x)[..., :WIDTH].tanh())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, num_blocks: int, checkpoints: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.checkpoints = checkpoints

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.norm(x)


class Model(nn.Module):
    def __init__(self, num_blocks: int, checkpoints: bool = False, is_tied: bool = False) -> None:
        super().__init__()
        self.model = Decoder(num_blocks, checkpoints)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if is_tied:
            self.lm_head.weight = self.model.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens)).sum()


TOKENS = torch.zeros(2, 3, dtype=torch.long)


class Log:
    """What FSDP1 does, seen from inside: patches its functions once."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.units: dict[int, str] = {}
        self.events: dict[int, str] = {}
        self.kept: list[Any] = []  # so that no event's id is used twice
        self.freed = ""
        self._watch(_flat_param.FlatParamHandle, "_all_gather_flat_param", self._on_all_gather)
        self._watch(_runtime_utils, "_reduce_grad", self._on_reduce("RS"))
        self._watch(_runtime_utils, "_reduce_grad_no_shard", self._on_reduce("AR"))
        self._watch(_runtime_utils, "_reshard", self._on_reshard)
        self._watch(_limiter_utils._FreeEventQueue, "enqueue", self._on_enqueue)
        event_queue: Any = _limiter_utils._FreeEventQueue
        dequeue = event_queue.dequeue_if_needed

        def dequeue_if_needed(queue: Any) -> Any:
            event = dequeue(queue)
            if id(event) in self.events:
                self.calls.append(f"limit {self.events[id(event)]}")
            return event

        event_queue.dequeue_if_needed = dequeue_if_needed

    def _watch(self, owner: Any, name: str, look: Any) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            look(*args)
            return original(*args, **kwargs)

        setattr(owner, name, watched)

    def _on_all_gather(self, handle: Any, *_rest: Any) -> None:
        self.calls.append(f"AG {self.units[id(handle)]}")

    def _on_reduce(self, kind: str) -> Any:
        return lambda _state, handle: self.calls.append(f"{kind} {self.units[id(handle)]}")

    def _on_reshard(self, _state: Any, handle: Any, _frees: bool) -> None:
        self.freed = self.units[id(handle)]

    def _on_enqueue(self, _queue: Any, event: Any) -> None:
        self.kept.append(event)
        self.events[id(event)] = self.freed

    def begin_step(self) -> None:
        self.calls, self.events = [], {}


def fsdp1(log: Log, question: dict[str, Any]) -> list[str]:
    wrapping, strategy = question["wrapping"], question["sharding_strategy"]
    policy: Any = None
    if wrapping == "huggingface":
        policy = ModuleWrapPolicy({Block})
    elif wrapping != "none":
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=int(wrapping.split(":")[1]))
    prefetch = question["backward_prefetch"]
    options: dict[str, Any] = {}
    if "HYBRID" in strategy:
        options["device_mesh"] = init_device_mesh("cpu", (2, RANKS // 2))
    model = FullyShardedDataParallel(
        Model(question["num_blocks"], question["checkpoints"]),
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy[strategy],
        backward_prefetch=None if prefetch == "none" else BackwardPrefetch[prefetch],
        forward_prefetch=question["forward_prefetch"],
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        **options,
    )
    log.units = {}
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle:
            parts = [part for part in name.split(".") if part != "_fsdp_wrapped_module"]
            log.units[id(module._handle)] = ".".join(filter(None, parts)) or "root"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _step in range(4):
        log.begin_step()
        for number in range(question["micro_batches"]):
            is_last = number == question["micro_batches"] - 1
            with model.no_sync() if question["no_sync"] and not is_last else nullcontext():
                model(TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return log.calls


def ddp(question: dict[str, Any]) -> list[int]:
    buckets: list[int] = []

    def hook(_state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
        buckets.append(bucket.buffer().numel())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = Model(question["num_blocks"], is_tied=question["is_tied"])
    wrapped = DistributedDataParallel(model, bucket_cap_mb=question["bucket_cap_mb"])
    wrapped.register_comm_hook(None, hook)
    for _step in range(3):
        buckets.clear()
        with torch.autocast("cpu", torch.bfloat16):
            loss = wrapped(TOKENS)
        loss.backward()
    return buckets


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    log = Log()
    questions = json.loads(sys.argv[1])
    answers = [fsdp1(log, q) if q["kind"] == "fsdp1" else ddp(q) for q in questions]
    print(json.dumps(answers))
