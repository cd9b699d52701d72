"""A job -> Python that applies FSDP2, FSDP1 or DDP to a model with Hugging Face's module names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zsim.dtypes import ELEMENT_TYPES
from zsim.frameworks.ddp.settings import DdpConfig
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.specs.experiment.job import Job
from zsim.specs.formats.export import ProgramFile, ProgramWriter

_MESH = "from torch.distributed.device_mesh import init_device_mesh"


class PythonWriter(ProgramWriter):
    """Writes fsdp2.py, fsdp1.py or ddp.py."""

    def write(self, job: Job) -> ProgramFile | None:
        program, name = _PROGRAMS.get(job.kind), f"{job.kind}.py"
        if program is None:
            return ProgramFile(name, reason=_REASONS[job.kind]) if job.kind in _REASONS else None
        reason = _why_not_python(job)
        return ProgramFile(name, "" if reason else "\n".join(program(job, job.strategy)) + "\n", reason)

    def release_notes(self, job: Job) -> Iterator[str]:
        if getattr(job.strategy, "before_torch_2", False):
            yield "it is simulated as in torch 1.12 and 1.13"


WRITER = PythonWriter()


def _why_not_python(job: Job) -> str | None:
    """The reason why a few lines of Python cannot express this job, or None if they can."""
    if not job.parallelism.is_trivial:
        return "it shards a model, and splits no layer, sequence or pipeline ([parallelism])"
    if job.training.activation_checkpointing == "selective":
        return "recomputing the core of attention is the model's own business"
    if calls := list(long_sequence_calls(job)):
        return f"it leaves to the model what long sequences take: {'; '.join(calls)}"
    if job.training.block_checkpointing:
        return "it checkpoints every n-th block alike, not each block in its own way"
    if getattr(job.strategy, "param_dtype", "") == "fp8":
        return "gathering in fp8 needs torchao's float8 modules"
    if job.model.has_encoder:
        return f"'{job.model.name}' is an encoder with a decoder; zsim writes programs for one list of blocks"
    if job.model.towers:
        return f"'{job.model.name}' has towers; zsim writes programs that train on text"
    return None


def long_sequence_calls(job: Job) -> Iterator[str]:
    """The calls by which a script fits its model for long sequences."""
    offload = job.training.checkpoint_offload
    if offload == "stream":
        yield "a context that copies checkpoints on a stream of its own, such as TRL's OffloadActivations"
    elif offload is not None:
        yield f"torch.autograd.graph.save_on_cpu(pin_memory={offload == 'pinned'}) around each checkpoint"
    if job.training.mlp_tiles > 1:
        yield f"deepspeed.runtime.sequence_parallel.ulysses_sp.TiledMLP with {job.training.mlp_tiles} shards"


def checkpointing_call(job: Job) -> str:
    """The call by which a script checkpoints all blocks. It is empty without checkpointing."""
    training = job.training
    if training.activation_checkpointing == "full" and training.checkpoint_every > 1:
        return f"torch.utils.checkpoint around one block of {training.checkpoint_every}"
    return {
        "none": "",
        "full": "model.gradient_checkpointing_enable()",
        "selective": "recompute the core of attention",
        "selective-op": "keep fused attention and every second product, run the rest again",
    }[training.activation_checkpointing]


def _fsdp2(job: Job, strategy: Fsdp2Config) -> Iterator[str]:
    yield from _head(job, "FSDP2")
    offload = "CPUOffloadPolicy, " if strategy.cpu_offload else ""
    yield from _imports(
        job, _MESH, f"from torch.distributed.fsdp import {offload}MixedPrecisionPolicy, fully_shard"
    )
    yield from _constants(job)
    yield from _checkpointing(job)
    shard = job.world_size // strategy.replicate
    shape = f"({strategy.replicate}, {shard})" if strategy.replicate > 1 else f"({shard},)"
    names = '("replicate", "shard")' if strategy.replicate > 1 else '("shard",)'
    yield 'def apply(model, device_type="cuda"):'
    yield '    """Shards `model` in place, before its optimizer is made."""'
    yield f"    mesh = init_device_mesh(device_type, {shape}, mesh_dim_names={names})"
    param, reduce = _torch_dtype(strategy.param_dtype), _torch_dtype(strategy.reduce_dtype)
    yield f"    precision = MixedPrecisionPolicy(param_dtype={param}, reduce_dtype={reduce})"
    yield '    options = {"mesh": mesh, "mp_policy": precision}'
    if strategy.cpu_offload:
        yield '    options["offload_policy"] = CPUOffloadPolicy()'
    yield "    blocks = model.get_submodule(BLOCKS)"
    yield from _wrap_blocks(job)
    yield from _shard_units(job, strategy)
    yield "    return model"
    yield from _step(job, _accumulate_fsdp2(strategy), _CLIP)


def _shard_units(job: Job, strategy: Fsdp2Config) -> Iterator[str]:
    requested = strategy.reshard_after_forward
    reshard = strategy.wrapping != "automodel" if requested is None else requested
    has_separate_units = _has_separate_units(job)
    if has_separate_units:
        yield "    embeddings = [model.get_submodule(name) for name in EMBEDDINGS]"
        yield f"    fully_shard(embeddings, reshard_after_forward={reshard}, **options)"
    if strategy.wrapping == "torchtitan-0.1":
        yield "    last = len(blocks) - 1"
        yield "    for number, block in enumerate(blocks):"
        yield f"        reshard = {reshard} if number < last else False"
        yield "        fully_shard(block, reshard_after_forward=reshard, **options)"
    elif strategy.wrapping.startswith("blocks:"):
        count = strategy.wrapping.partition(":")[2]
        yield f"    for first in range(0, len(blocks), {count}):"
        yield f"        unit = [blocks[number] for number in range(first, min(first + {count}, len(blocks)))]"
        yield f"        fully_shard(unit, reshard_after_forward={reshard}, **options)"
    elif strategy.wrapping != "none":
        yield "    for block in blocks:"
        yield f"        fully_shard(block, reshard_after_forward={reshard}, **options)"
    if has_separate_units:
        yield "    head = [model.get_submodule(name) for name in HEAD]"
        yield "    fully_shard(head, reshard_after_forward=False, **options)"
    yield "    fully_shard(model, reshard_after_forward=False, **options)  # the root: what is left"


def _fsdp1(job: Job, strategy: Fsdp1Config) -> Iterator[str]:
    yield from _head(job, f"FSDP1 {strategy.sharding_strategy}")
    if strategy.wrapping != "none":
        yield "import functools"
        yield ""
    is_hybrid = strategy.replicate > 1
    policy = "size_based_auto_wrap_policy" if strategy.wrapping[:5] == "size:" else "lambda_auto_wrap_policy"
    names = "BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy"
    yield from _imports(
        job,
        *([_MESH] if is_hybrid else []),
        f"from torch.distributed.fsdp import {names}",
        *(["from torch.distributed.fsdp import CPUOffload"] if strategy.cpu_offload else []),
        *([] if strategy.wrapping == "none" else [f"from torch.distributed.fsdp.wrap import {policy}"]),
    )
    yield from _constants(job)
    yield from _checkpointing(job)
    yield 'def apply(model, device_type="cuda"):'
    yield '    """`model` wrapped, before its optimizer is made."""'
    yield "    blocks = model.get_submodule(BLOCKS)"
    yield from _wrap_blocks(job)
    yield from _fsdp1_policy(strategy)
    param, reduce = _torch_dtype(strategy.param_dtype), _torch_dtype(strategy.reduce_dtype)
    dtypes = f'"param_dtype": {param}, "reduce_dtype": {reduce}, "buffer_dtype": {param}'
    yield f"    dtypes = {{{dtypes}}}"
    yield "    precision = MixedPrecision(**dtypes)"
    if is_hybrid:
        shard = job.world_size // strategy.replicate
        yield f"    mesh = init_device_mesh(device_type, ({strategy.replicate}, {shard}))"
    prefetch = strategy.backward_prefetch
    yield "    return FullyShardedDataParallel("
    yield "        model,"
    yield f"        sharding_strategy=ShardingStrategy.{strategy.sharding_strategy},"
    yield "        auto_wrap_policy=policy,"
    yield "        mixed_precision=precision,"
    yield f"        backward_prefetch={'None' if prefetch == 'none' else f'BackwardPrefetch.{prefetch}'},"
    yield f"        forward_prefetch={strategy.forward_prefetch},"
    yield f"        limit_all_gathers={strategy.limit_all_gathers},"
    yield "        use_orig_params=True,"
    if is_hybrid:
        yield "        device_mesh=mesh,"
    if strategy.cpu_offload:
        yield "        cpu_offload=CPUOffload(offload_params=True),"
    yield "    )"
    yield from _step(job, _NO_SYNC if strategy.no_sync else (), "model.clip_grad_norm_(MAX_GRAD_NORM)")


def _fsdp1_policy(strategy: Fsdp1Config) -> Iterator[str]:
    if strategy.wrapping == "none":
        yield "    policy = None"
    elif strategy.wrapping.startswith("size:"):
        size = int(strategy.wrapping.partition(":")[2])
        yield f"    policy = functools.partial(size_based_auto_wrap_policy, min_num_params={size})"
    else:
        yield "    chosen = set(blocks)"
        if strategy.wrapping == "peft":
            yield "    leaves = (module for module in model.modules() if not list(module.children()))"
            yield "    for module in leaves:"
            yield "        if getattr(getattr(module, 'weight', None), 'requires_grad', False):"
            yield "            chosen.add(module)"
        yield ""
        yield "    def is_chosen(module):"
        yield "        return module in chosen"
        yield ""
        yield "    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_chosen)"


def _ddp(job: Job, strategy: DdpConfig) -> Iterator[str]:
    yield from _head(job, "DDP")
    yield from _imports(job, "from torch.nn.parallel import DistributedDataParallel")
    yield from _constants(job)
    yield from _checkpointing(job)
    yield 'def apply(model, device_type="cuda"):'
    precision = job.training.precision
    autocast_note = (
        "" if precision == "fp32" else f'; run it under torch.autocast("cuda", {_torch_dtype(precision)})'
    )
    yield f'    """`model` wrapped, before its optimizer is made{autocast_note}."""'
    yield "    blocks = model.get_submodule(BLOCKS)"
    yield from _wrap_blocks(job)
    yield "    return DistributedDataParallel("
    yield "        model,"
    yield f"        bucket_cap_mb={strategy.bucket_cap_bytes / 2**20:g},"
    yield f"        gradient_as_bucket_view={strategy.gradient_as_bucket_view},"
    yield "    )"
    yield from _step(job, _NO_SYNC if strategy.no_sync else (), _CLIP)


def _head(job: Job, title: str) -> Iterator[str]:
    yield f'"""{title} for {job.model.name} on {job.world_size:,} GPUs.'
    yield ""
    yield "The model's modules have the names that Hugging Face's transformers gives them."
    yield '"""'
    yield ""


def _imports(job: Job, *lines: str) -> Iterator[str]:
    """`import torch`, then `lines` and the imports of checkpointing, sorted by module."""
    kind = job.training.activation_checkpointing
    import_lines = list(lines)
    if kind != "none":
        module = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
        names = "CheckpointImpl, checkpoint_wrapper" if _is_reentrant(job) else "checkpoint_wrapper"
        import_lines.append(f"from {module} import {names}")
    if kind == "selective-op":
        import_lines.append(
            "from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts"
        )
    yield "import torch"
    yield from sorted(import_lines, key=lambda line: line.split()[1])


def _is_reentrant(job: Job) -> bool:
    return job.training.activation_checkpointing == "full" and job.training.checkpoint_is_reentrant


def _constants(job: Job) -> Iterator[str]:
    training, model = job.training, job.model
    yield ""
    yield f'BLOCKS = "{model.block_prefix}"'
    if _has_separate_units(job):
        heads = [module.name for module in model.after if module.parameters]
        yield f"EMBEDDINGS = {json.dumps([module.name for module in model.before if module.parameters])}"
        yield f"HEAD = {json.dumps(heads)}"
    yield f"SEQUENCE_LENGTH = {training.sequence_length}"
    yield f"MICRO_BATCH_SIZE = {training.micro_batch_size}"
    yield f"GRADIENT_ACCUMULATION_STEPS = {training.gradient_accumulation_steps}"
    if training.gradient_clipping:
        yield f"MAX_GRAD_NORM = {training.gradient_clipping}"
    yield ""
    yield ""


def _has_separate_units(job: Job) -> bool:
    """Whether embedding and LM head are separate FSDP units."""
    wrapping = getattr(job.strategy, "wrapping", "")
    return wrapping.partition(":")[0] in ("torchtitan", "automodel", "blocks") and not job.model.is_tied


def _checkpointing(job: Job) -> Iterator[str]:
    if job.training.activation_checkpointing != "selective-op":
        return
    yield "def keep_every_second_product():"
    yield '    """Keep fused attention and every second matrix product; run the rest again."""'
    yield "    count = {False: 0, True: 0}"
    yield ""
    yield "    def policy(context, op, *args, **kwargs):"
    yield "        if op == torch.ops.aten.mm.default:"
    yield "            count[context.is_recompute] += 1"
    yield "            is_kept = count[context.is_recompute] % 2 == 1"
    yield "        else:"
    yield '            is_kept = "scaled_dot_product" in str(op)'
    yield "        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE"
    yield ""
    yield "    return create_selective_checkpoint_contexts(policy)"
    yield ""
    yield ""


def _wrap_blocks(job: Job) -> Iterator[str]:
    """Checkpointing, then compilation, of every block."""
    training = job.training
    kind = training.activation_checkpointing
    if kind == "none" and not training.compile:
        return
    yield "    for name, block in list(blocks.named_children()):"
    if kind != "none":
        more = "" if training.checkpoint_stops_early else ", early_stop=False"
        if _is_reentrant(job):
            more = ", checkpoint_impl=CheckpointImpl.REENTRANT"
        context = ", context_fn=keep_every_second_product" if kind == "selective-op" else ""
        call = f"checkpoint_wrapper(block{context}{more})"
        if training.checkpoint_every > 1:
            yield f"        if (int(name) + 1) % {training.checkpoint_every} == 0:"
            yield f"            block = {call}"
        else:
            yield f"        block = {call}"
    if training.compile:
        yield "        block.compile()"
    yield "        blocks.register_module(name, block)"


_BACKWARD = "(loss_of(model, micro_batch) / GRADIENT_ACCUMULATION_STEPS).backward()"
_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)"
_NO_SYNC = (
    "if is_last:", f"    {_BACKWARD}", "    continue",
    "with model.no_sync():", f"    {_BACKWARD}",
)  # fmt: skip


def _accumulate_fsdp2(strategy: Fsdp2Config) -> Sequence[str]:
    """The lines of a micro-batch under FSDP2 that knows whether it is the last of its step."""
    if strategy.defers_all_reduce:
        return ("model.set_requires_all_reduce(is_last)", _BACKWARD)
    return ("model.set_requires_gradient_sync(is_last)", _BACKWARD) if strategy.no_sync else ()


def _step(job: Job, accumulate: Sequence[str], clip: str) -> Iterator[str]:
    """The training step that the plan describes.

    `accumulate` are the lines of a micro-batch that reduces only if it is the last, and empty if all reduce.
    `clip` is the call that clips gradients.
    """
    training = job.training
    yield ""
    yield ""
    yield "def train_step(model, optimizer, loss_of, micro_batches):"
    yield '    """One step; `loss_of(model, micro_batch)` is a scalar."""'
    yield "    for number, micro_batch in enumerate(micro_batches):"
    if training.gradient_accumulation_steps > 1 and accumulate:
        yield "        is_last = number + 1 == GRADIENT_ACCUMULATION_STEPS"
        yield from (f"        {line}" for line in accumulate)
    else:
        yield f"        {_BACKWARD}"
    if training.gradient_clipping:
        yield f"    {clip}"
    yield "    optimizer.step()"
    yield "    optimizer.zero_grad()"


def _torch_dtype(name: str) -> str:
    """The type's name in torch. It is bf16 for fp8, which only the products use, over bf16 tensors."""
    return f"torch.{ELEMENT_TYPES['bf16' if name == 'fp8' else name].torch}"


_PROGRAMS: Mapping[str, Callable[[Job, Any], Iterator[str]]] = {"ddp": _ddp, "fsdp1": _fsdp1, "fsdp2": _fsdp2}
_REASONS = {
    "reference": "the reference engine is validation/zero's: no released framework runs it",
    "megatron": "Megatron takes a command line",
}
