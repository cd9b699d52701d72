"""A Llama parallelized as torchtitan v0.2.2 does it, on fake process groups: every collective and message.

Run as a script with a JSON list of questions; prints a JSON list of answers: by asked rank, the calls of the
second step as [kind, bytes, dtype, ranks], the bytes of each stage's buffers for messages, and those of each
tensor that autograd keeps of a forward, parameters aside. The ranks of a question that "is_real"
run together on gloo, all of them, and meet at its file.

The stages are torch's `PipelineStage`, their schedules torch's own, the tensor-parallel plan is torchtitan's
(`apply_tp` of models/llama3/infra/parallelize.py), and so are the units that `fully_shard` wraps
(`apply_fsdp`), the split of the loss, checkpointing and clipping.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from validation.collective_log import CollectiveLog

SCHEDULES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
    "looped-bfs": schedules.ScheduleLoopedBFS,
    "interleaved-zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv-zero-bubble": schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": schedules.ScheduleDualPipeV,
}
SAVED = {torch.ops.aten.mm.default, torch.ops._c10d_functional.reduce_scatter_tensor.default}
MESH = ("pp", "dp_replicate", "fsdp", "tp")


class Attention(nn.Module):
    def __init__(self, shape: Any) -> None:
        super().__init__()
        width, keys = shape["hidden"], shape["kv_heads"] * shape["head"]
        self.head = shape["head"]
        self.wq = nn.Linear(width, shape["heads"] * self.head, bias=False)
        self.wk = nn.Linear(width, keys, bias=False)
        self.wv = nn.Linear(width, keys, bias=False)
        self.wo = nn.Linear(shape["heads"] * self.head, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            product(x).view(batch, length, -1, self.head).transpose(1, 2)
            for product in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        made: Tensor = self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))
        return made


class FeedForward(nn.Module):
    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape["hidden"], shape["ffn"], bias=False)
        self.w2 = nn.Linear(shape["ffn"], shape["hidden"], bias=False)
        self.w3 = nn.Linear(shape["hidden"], shape["ffn"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return made


class Block(nn.Module):
    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(shape["hidden"]), nn.RMSNorm(shape["hidden"])

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        made: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return made


class Transformer(nn.Module):
    """The whole model, or the layers of one stage with embedding, norm and head at its ends."""

    def __init__(self, shape: Any, layers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape["vocab"], shape["hidden"]) if is_first else None
        self.layers = nn.ModuleDict({str(number): Block(shape) for number in layers})
        self.norm = nn.RMSNorm(shape["hidden"]) if is_last else None
        self.output = nn.Linear(shape["hidden"], shape["vocab"], bias=False) if is_last else None

    def forward(self, h: Tensor) -> Tensor:
        h = self.tok_embeddings(h) if self.tok_embeddings is not None else h
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h


class NoParallel(ParallelStyle):
    """torchtitan's style of a module that every rank computes whole, with DTensors as parameters."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def give(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, (Replicate(),), run_check=False)

        def take(_module: nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, give, take)


def apply_tp(model: Transformer, mesh: DeviceMesh, *, is_sequence: bool) -> None:
    """torchtitan's plan; without sequence parallelism that of its 0.3.0: activations between are whole."""
    spread = Shard(1) if is_sequence else Replicate()
    whole: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=spread),
        "output": ColwiseParallel(input_layouts=spread, output_layouts=Shard(-1), use_local_output=False),
    }
    norm: Any = SequenceParallel() if is_sequence else NoParallel()
    parallelize_module(model, mesh, whole | {"norm": norm})
    for block in model.layers.values():
        plan: dict[str, Any] = {
            "attention_norm": norm,
            "ffn_norm": norm,
            "attention": PrepareModuleInput(input_layouts=(spread,), desired_input_layouts=(Replicate(),)),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=spread),
            "feed_forward": PrepareModuleInput(input_layouts=(spread,), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=spread),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(block, mesh, plan)


def apply_ac(model: Transformer, policy: str) -> None:
    def contexts() -> Any:
        seen: dict[str, int] = defaultdict(int)

        def policy_of(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            key = "again" if context.is_recompute else "forward"
            if func == torch.ops.aten.mm.default:
                seen[key] += 1
            is_saved = func in SAVED and not (func == torch.ops.aten.mm.default and seen[key] % 2 == 0)
            is_saved = is_saved or "scaled_dot_product" in str(func)
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy_of)

    options: Any = {"context_fn": contexts} if policy == "selective-op" else {}
    for name, block in model.layers.named_children():
        if policy != "none":
            model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False, **options))


def apply_fsdp(model: Transformer, mesh: DeviceMesh, question: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    config: Any = {"mesh": mesh, "mp_policy": policy}
    reshards = question["reshards"]
    if reshards is None:
        reshards = question["pp"] == 1
    if model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, **config, reshard_after_forward=reshards)
    for block in model.layers.values():
        fully_shard(block, **config, reshard_after_forward=reshards)
    if model.norm is not None and model.output is not None:
        always = question["reshards"] is True and question["pp"] > 1
        fully_shard([model.norm, model.output], **config, reshard_after_forward=always)
    fully_shard(model, **config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(question["is_real"])  # gloo has no other reduction


class Log(CollectiveLog):
    """Calls with the ranks of their group."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[Any]] = []

    def _add(self, kind: str, tensors: Any, group: Any, *rest: Any) -> None:
        super()._add(kind, tensors, group, *rest)
        call = self.calls[-1]
        self.found.append([kind, call.bytes, call.dtype, dist.get_process_group_ranks(group)])


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")


def answer(question: Any, rank: int) -> dict[str, Any]:
    """The answer of one rank."""
    sizes = [question[name] for name in MESH]
    world = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    if question["is_real"]:
        store = FileStore(question["file"], world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        return _answer(question, init_device_mesh("cpu", tuple(sizes), mesh_dim_names=MESH))
    finally:
        dist.destroy_process_group()


def _answer(question: Any, mesh: DeviceMesh) -> dict[str, Any]:
    shape, ranks, micro_batches = question["shape"], question["pp"], question["micro_batches"]
    layers, total = question["layers_per_stage"], len(question["layers_per_stage"])
    place = mesh["pp"].get_local_rank()
    is_v = question["schedule"] in ("zbv-zero-bubble", "dualpipe-v")
    held = [place, 2 * ranks - 1 - place] if is_v else list(range(place, total, ranks))
    data = mesh["dp_replicate", "fsdp"] if question["dp_replicate"] > 1 else mesh["fsdp"]
    length = question["length"]
    local = length // (question["tp"] if question["sequence_parallel"] else 1)
    parts: list[Any] = []
    stages: list[Any] = []
    saved: dict[int, Tensor] = {}
    for number in held:
        first = sum(layers[:number])
        model = Transformer(
            shape, range(first, first + layers[number]), is_first=number == 0, is_last=number == total - 1
        )
        if question["tp"] > 1:
            apply_tp(model, mesh["tp"], is_sequence=question["sequence_parallel"])
        apply_ac(model, question["checkpointing"])
        apply_fsdp(model, data, question)
        parts.append(model)
        if ranks == 1:
            continue
        hidden = torch.empty(1, local, shape["hidden"], dtype=torch.bfloat16, device="meta")
        given = torch.empty(1, length, dtype=torch.int64, device="meta") if number == 0 else hidden
        given.requires_grad_(number > 0)
        made = hidden.detach().clone().requires_grad_()
        stages.append(
            PipelineStage(
                model, number, total, torch.device("cpu"), input_args=given, output_args=made,
                group=mesh["pp"].get_group(),
            )
        )  # fmt: skip
    optimizer = torch.optim.AdamW(
        [parameter for part in parts for parameter in part.parameters()], lr=1e-3, foreach=True
    )
    schedule: Any = None
    if stages:
        made_by: Any = SCHEDULES[question["schedule"]]
        single = question["schedule"] in ("gpipe", "1f1b")
        schedule = made_by(
            stages[0] if single else stages, n_microbatches=micro_batches, loss_fn=loss_of, scale_grads=False
        )
        schedule._warmup_p2p = _static  # shapes are given, so no rank asks the others for them
    log = Log()
    for _ in range(2):
        log.found.clear()
        with log:
            optimizer.zero_grad()
            _forward_backward(question, parts, schedule, held, total)
            _clip(parts, mesh, question)
            optimizer.step()
    buffers = [
        sum(info.buffer.nbytes for infos in given.values() for info in infos if info.buffer is not None)
        for stage in stages
        for given in (stage.args_recv_info, stage.grad_recv_info)
    ]
    if schedule is None:
        _forward_backward(question | {"micro_batches": 1}, parts, None, held, total, saved)
    sizes = sorted(tensor.untyped_storage().nbytes() for tensor in saved.values())
    return {"calls": log.found, "buffers": buffers, "saved": sizes}


def _static(stages: list[Any], *_: Any) -> None:
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def _keeping(saved: dict[int, Tensor], part: nn.Module) -> Any:
    """A context in which autograd's saved tensors that are not parameters are put down by storage."""

    def local(tensor: Tensor) -> Tensor:
        inner = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return getattr(inner, "elem", inner)

    def pack(tensor: Tensor) -> Tensor:
        own = {local(parameter).untyped_storage().data_ptr() for parameter in part.parameters()}
        place = local(tensor).untyped_storage().data_ptr()
        if place not in own:
            saved[place] = local(tensor)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _forward_backward(
    question: Any,
    parts: list[Any],
    schedule: Any,
    held: list[int],
    total: int,
    saved: dict[int, Tensor] | None = None,
) -> None:
    micro_batches, length = question["micro_batches"], question["length"]
    with loss_parallel() if question["tp"] > 1 else nullcontext():
        if schedule is None:
            for _ in range(micro_batches):
                tokens = torch.zeros(1, length, dtype=torch.int64)
                with _keeping(saved, parts[0]) if saved is not None else nullcontext():
                    loss = loss_of(parts[0](tokens), tokens)
                loss.backward()
            return
        tokens = torch.zeros(micro_batches, length, dtype=torch.int64)
        inputs = (tokens,) if 0 in held else ()
        is_last = total - 1 in held
        losses: Any = [] if is_last else None
        schedule.step(*inputs, target=tokens if is_last else None, losses=losses, return_outputs=False)


def _clip(parts: list[Any], mesh: DeviceMesh, question: Any) -> None:
    """torchtitan's `clip_grad_norm_`."""
    parameters = [parameter for part in parts for parameter in part.parameters()]
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, 2.0, foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if question["pp"] > 1:
        norm **= 2.0
        dist.all_reduce(norm, group=mesh["pp"].get_group())
        norm **= 0.5
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    pairs = [(question, rank) for question in asked for rank in question["ranks"]]
    # a process per answer: DTensor keeps the groups' names of an earlier world
    together = max(len(question["ranks"]) if question["is_real"] else 1 for question in asked)
    with multiprocessing.get_context("fork").Pool(together, maxtasksperchild=1) as pool:
        answers = iter(pool.starmap(answer, pairs, chunksize=1))
    print(json.dumps([{str(rank): next(answers) for rank in question["ranks"]} for question in asked]))
