"""A job -> the script that starts Megatron-Core 0.16 with its settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zsim.frameworks.megatron.settings.config import MegatronConfig, is_core
from zsim.frameworks.megatron.settings.table import VOCABULARY_MULTIPLE, MegatronTable
from zsim.programs.megatron_lm.degrees import CONTEXT_METHODS
from zsim.programs.megatron_lm.expert_flags import DISPATCHERS
from zsim.programs.megatron_lm.fsdp_flags import cpu_optimizer_flags, fsdp_flags, precision_aware_flags
from zsim.programs.megatron_lm.keys import OFF_SWITCHES, ON_SWITCHES, PRECISION_AWARE
from zsim.programs.megatron_lm.muon_flags import muon_flags
from zsim.programs.megatron_lm.network_flags import network_flags, why_not_network
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.training.attention import attention_of
from zsim.specs.experiment.training.fp8 import unmark_fp8_layers
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.formats.export import ProgramFile, ProgramWriter
from zsim.specs.formats.program_key import ProgramKey
from zsim.specs.library import Library
from zsim.specs.model.expert_layer import has_experts
from zsim.specs.model.prediction import remove_prediction_layers
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS

_FILE = "megatron.sh"
_METHODS = {method: name for name, method in CONTEXT_METHODS.items()}
_ORDERS = (("pipeline", "data", "context", "tensor"), ("data", "pipeline", "context", "tensor"))
_LOSSES = ("megatron", "megatron-fused", "fused")
_RECIPES = {"current": "tensorwise", "block": "blockwise", "mxfp8": "mxfp8"}


class ScriptWriter(ProgramWriter):
    """Writes megatron.sh."""

    def write(self, job: Job) -> ProgramFile | None:
        if job.kind != MegatronConfig.kind:
            return None
        reason = _why_not_megatron(job)
        return ProgramFile(_FILE, "" if reason is not None else megatron_script(job), reason)


WRITER = ScriptWriter()


def _table_of(job: Job) -> MegatronTable:
    table = job.experiment.strategy
    assert isinstance(table, MegatronTable)
    return table


def _why_not_megatron(job: Job) -> str | None:
    """The reason why Megatron's command line cannot express this Megatron job, or None if it can."""
    table, training, parallelism = _table_of(job), job.training, job.parallelism
    if table.engine != "megatron":
        return f"engine '{table.engine}' has a file of its own"
    if not is_core(table.version):
        return f"Megatron {table.version} has other flags than Core"
    if table.cuda_graph and table.check_for_nan:
        return "a graph of the whole step cannot look for NaN (check_for_nan)"
    if training.cross_entropy not in _LOSSES:
        return f"it has no cross entropy '{training.cross_entropy}'"
    if training.checkpoint_every > 1 or job.experiment.training.block_checkpointing:
        return "it checkpoints every layer, or the first of every stage"
    if parallelism.order not in _ORDERS:
        return "its mesh has the orders tp-cp-dp-pp and tp-cp-pp-dp"
    if parallelism.passes > 1:
        return "it runs one pipeline a step"
    return why_not_network(remove_prediction_layers(unmark_fp8_layers(job.model)))


def megatron_script(job: Job) -> str:
    """The text of the script. Its reader must set the data, the learning rate and the number of steps."""
    groups = {
        "DISTRIBUTED_ARGS": [f"--nproc_per_node {job.gpus_per_node}", f"--nnodes {job.num_nodes}"],
        "GPT_MODEL_ARGS": list(_network(job)),
        "TRAINING_ARGS": list(_training(job)),
        "MODEL_PARALLEL_ARGS": list(_parallelism(job)),
        "DATA_PARALLEL_ARGS": list(_data_parallelism(job)),
        "RUN_ARGS": ["--mock-data", "--train-iters 100", "--lr 1e-4"],
    }
    lines = ["#!/bin/bash", *_environment(job)]
    for name, flags in groups.items():
        lines += ["", f"{name}=(", *(f"    {flag}" for flag in flags), ")"]
    names = [f"${{{name}[@]}}" for name in groups]
    lines += ["", f"torchrun {names[0]} pretrain_gpt.py \\", "    " + " ".join(names[1:])]
    return "\n".join(lines) + "\n"


def _environment(job: Job) -> Iterator[str]:
    connections = job.training.device_max_connections
    if connections != DEFAULT_CONNECTIONS:
        yield f"export CUDA_DEVICE_MAX_CONNECTIONS={connections}"
    if job.training.expandable_segments:
        yield "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def _network(job: Job) -> Iterator[str]:
    vocabulary = Library().model(job.experiment.model).vocab_size
    model = remove_prediction_layers(unmark_fp8_layers(job.model))
    yield from network_flags(model, vocabulary, job.training.sequence_length)
    table = _table_of(job)
    if table.vocabulary_multiple != VOCABULARY_MULTIPLE:
        yield f"--make-vocab-size-divisible-by {table.vocabulary_multiple}"


def _attention_backend(job: Job) -> str:
    """The backend of Transformer Engine. "flash" keeps it from cuDNN's kernels."""
    if job.training.attention != "flash":
        return "unfused"
    experiment = job.experiment
    chosen = attention_of(
        experiment.training, experiment.strategy, job.cluster.gpus, job.model, job.parallelism
    )
    return "fused" if chosen in ("cudnn", "cudnn-deterministic") else "flash"


def _training(job: Job) -> Iterator[str]:
    training, training_table = job.training, job.experiment.training
    steps = training.gradient_accumulation_steps
    yield f"--seq-length {training.sequence_length}"
    yield f"--micro-batch-size {training.micro_batch_size}"
    yield f"--global-batch-size {training.micro_batch_size * steps * job.data_parallel_size}"
    yield f"--clip-grad {training.gradient_clipping:g}"
    if training.optimizer == "lion":
        yield "--optimizer lion"
    if training.optimizer == "muon":
        yield from muon_flags(_table_of(job))
    if training.optimizer.startswith("sgd"):
        yield f"--optimizer sgd --sgd-momentum {0.9 if training.optimizer == 'sgd_momentum' else 0:g}"
    if training.precision != "fp32":
        yield "--bf16" if training.precision == "fp8" else f"--{training.precision}"
    if training.precision == "fp8":
        yield from _low_precision(job)
    yield f"--attention-backend {_attention_backend(job)}"
    if training.cross_entropy in ("fused", "megatron-fused"):
        yield "--cross-entropy-loss-fusion"
    if training.cross_entropy == "fused":
        yield "--cross-entropy-fusion-impl te"
    yield from _recomputation(training_table)


def _low_precision(job: Job) -> Iterator[str]:
    recipe, training_table = job.training.fp8.recipe, job.experiment.training
    table = _table_of(job)
    yield "--fp4-format e2m1" if recipe == "nvfp4" else "--fp8-format hybrid"
    if recipe in _RECIPES:
        yield f"--fp8-recipe {_RECIPES[recipe]}"
    end_layers = training_table.bf16_first_layers, training_table.bf16_last_layers
    if max(end_layers):
        yield "--first-last-layers-bf16"
        yield f"--num-layers-at-start-in-bf16 {end_layers[0]} --num-layers-at-end-in-bf16 {end_layers[1]}"
    if table.fp8_param_gather:
        yield "--fp8-param-gather"
    if table.tp_only_amax_red:
        yield "--tp-only-amax-red"


def _recomputation(training_table: TrainingTable) -> Iterator[str]:
    if training_table.activation_checkpointing == "selective":
        yield "--recompute-granularity selective"
        if training_table.recompute_modules is not None:
            yield " ".join(("--recompute-modules", *training_table.recompute_modules))
    elif training_table.activation_checkpointing == "full":
        method, layers = training_table.recompute_method or "uniform", training_table.recompute_layers or 1
        yield f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {layers}"


def _parallelism(job: Job) -> Iterator[str]:
    parallelism = job.parallelism
    yield f"--tensor-model-parallel-size {parallelism.tensor}"
    yield f"--pipeline-model-parallel-size {parallelism.pipeline}"
    yield f"--context-parallel-size {parallelism.context}"
    if parallelism.sequence_parallel:
        yield "--sequence-parallel"
    if parallelism.async_tensor:
        yield "--tp-comm-overlap"
    if parallelism.tensor > 1 and not (parallelism.sequence_parallel or parallelism.overlap_tensor_reduce):
        yield "--no-async-tensor-model-parallel-allreduce"
    if parallelism.pipeline > 1:
        yield from _stages(job)
    if parallelism.context > 1:
        yield f"--cp-comm-type {_METHODS[parallelism.context_method]}"
        if parallelism.context_method == "a2a+p2p":
            inner = parallelism.context_inner
            yield f"--hierarchical-context-parallel-sizes {inner} {parallelism.context // inner}"
    if parallelism.order != ParallelismConfig().order:
        yield "--use-tp-pp-dp-mapping"
    if has_experts(job.model):
        yield from _experts(job)


def _experts(job: Job) -> Iterator[str]:
    """The flags for the placement of routed experts, and for how they run."""
    experts, table = job.parallelism.experts, _table_of(job)
    yield f"--expert-model-parallel-size {experts.ranks}"
    yield f"--expert-tensor-parallel-size {experts.tensor}"
    types = {dispatcher: name for name, dispatcher in DISPATCHERS.items() if name != "alltoall_seq"}
    if experts.dispatcher in types:
        yield f"--moe-token-dispatcher-type {types[experts.dispatcher]}"
    else:
        yield f"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {experts.dispatcher}"
    if job.experiment.parallelism.expert_imbalance == 1:
        yield "--moe-router-force-load-balancing"
    if experts.capacity_factor is not None:
        yield f"--moe-expert-capacity-factor {experts.capacity_factor:g}"
    for key, flag in (
        ("moe_grouped_gemm", "--moe-grouped-gemm"),
        ("moe_permute_fusion", "--moe-permute-fusion"),
        ("enable_experimental", "--enable-experimental"),
        ("moe_pad_to_capacity", "--moe-pad-expert-input-to-capacity"),
        ("moe_router_padding", "--moe-router-padding-for-quantization"),
        ("overlap_shared_experts", "--moe-shared-expert-overlap"),
        ("overlap_expert_parallel", "--overlap-moe-expert-parallel-comm"),
        ("delay_wgrad_compute", "--delay-wgrad-compute"),
    ):
        if getattr(table, key):
            yield flag
    if table.moe_router_dtype is not None:
        yield f"--moe-router-dtype {table.moe_router_dtype}"
    if table.moe_aux_loss:
        yield "--moe-aux-loss-coeff 1e-3"


def _stages(job: Job) -> Iterator[str]:
    """The flags for the split into stages.

    Equal stages are given by their number. If an end has one layer less, there are flags for it. Any other
    split is a layout.
    """
    parallelism, table = job.parallelism, job.experiment.parallelism
    missing_layers = (table.first_stage_less_layers or 0, table.last_stage_less_layers or 0)
    if table.layers_per_stage is not None or max(missing_layers) > 1:
        stages = ["t" * layers for layers in parallelism.layers_per_stage]
        yield f"--pipeline-model-parallel-layout 'E{'|'.join(stages)}L'"
        return
    if parallelism.virtual_stages > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {parallelism.virtual_stages}"
    if missing_layers[0]:
        yield "--account-for-embedding-in-pipeline-split"
    if missing_layers[1]:
        yield "--account-for-loss-in-pipeline-split"


def _switches(table: MegatronTable, keys: Iterable[ProgramKey]) -> Iterator[str]:
    """The switches that the table's settings need."""
    for key in keys:
        if key.value_of(getattr(table, key.setting.removeprefix("strategy."))):
            yield key.key


def _data_parallelism(job: Job) -> Iterator[str]:
    table, strategy = _table_of(job), job.strategy
    assert isinstance(strategy, MegatronConfig)
    yield from _switches(table, [key for key in ON_SWITCHES if key is not PRECISION_AWARE])
    if strategy.param_dtype == "bf16" and strategy.grad_dtype == "bf16":
        if table.main_grads_dtype == "fp32":
            yield "--grad-reduce-in-bf16"
    elif strategy.param_dtype == "fp16" and strategy.grad_dtype == "fp32":
        yield "--accumulate-allreduce-grads-in-fp32"
    if table.transformer_impl == "local":
        yield "--transformer-impl local"
    yield from fsdp_flags(table)
    yield from precision_aware_flags(table)
    yield from cpu_optimizer_flags(table)
    if table.bucket_size is not None:
        yield f"--ddp-bucket-size {table.bucket_size}"
    if table.optimizer_instances > 1:
        yield f"--num-distributed-optimizer-instances {table.optimizer_instances}"
    yield from _switches(table, OFF_SWITCHES)
    if table.overlap_p2p_warmup_flush:
        yield "--overlap-p2p-communication-warmup-flush"
    if table.micro_batch_group is not None:
        yield f"--microbatch-group-size-per-virtual-pipeline-stage {table.micro_batch_group}"
    if table.timing_log_level:
        yield f"--timing-log-level {table.timing_log_level}"
    if table.mtp_layers:
        yield f"--mtp-num-layers {table.mtp_layers}"
    if table.cuda_graph:
        yield "--cuda-graph-impl local --cuda-graph-scope full_iteration"
    if table.cuda_graph_modules:
        yield f"--cuda-graph-impl transformer_engine --cuda-graph-scope {' '.join(table.cuda_graph_modules)}"
