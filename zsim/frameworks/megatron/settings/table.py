"""Megatron's data parallelism as an experiment has it: the `[strategy]` table of kind "megatron"."""

# See [Note: annotations of tables].

from typing import Annotated, Literal

from pydantic import Field, StrictBool, field_validator

from zsim.specs.strategy.table import StrategyTable

Engine = Literal["megatron", "nanotron", "internevo"]
FsdpSharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
StateDtype = Literal["fp32", "fp16", "bf16", "fp8"]
GraphModule = Literal["attn", "mlp", "moe_router", "moe_preprocess"]
NEWEST_CORE = "0.16.1"
CLIP_GRAD = 1.0  # --clip-grad
VOCABULARY_MULTIPLE = 128  # --make-vocab-size-divisible-by, with tensor parallelism 1


class MegatronTable(StrategyTable):
    """`kind = "megatron"`: Megatron-Core's DistributedDataParallel and its optimizers.

    Keys are named as on its command line. With `engine` the table is of another engine with nearly the same
    data parallelism: "nanotron" (torch's DDP, whose hook reduces fp32 sums) or "internevo" (gradients are
    summed on all ranks, and whole tensors belong to ranks, which broadcast them).

    Three keys differ from their flags: `bucket_size` (`--ddp-bucket-size`), `optimizer_instances`
    (`--num-distributed-optimizer-instances`) and `vocabulary_multiple` (`--make-vocab-size-divisible-by`).
    `fsdp_sharding` is `--data-parallel-sharding-strategy`, and `micro_batch_group` is
    `--microbatch-group-size-per-virtual-pipeline-stage`. `overlap_p2p`, `align_grad_reduce`,
    `align_param_gather`, `overlap_p2p_warmup_flush` and `micro_batch_group` belong to the interleaved
    schedule.
    """

    kind: Literal["megatron"] = Field(description="whose data parallelism")
    distributed_optimizer: StrictBool = Field(
        default=False, description="optimizer states are sharded over the data-parallel ranks (ZeRO-1)"
    )
    overlap_grad_reduce: StrictBool = Field(
        default=False, description="buckets of gradients are reduced during the last backward, not after it"
    )
    overlap_param_gather: StrictBool = Field(
        default=False, description="updated parameters are gathered bucket by bucket during the next forward"
    )
    grad_reduce_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="the type of gradients, as they are summed and reduced"
    )
    average_in_collective: StrictBool = Field(
        default=False, description="the collective averages, in place of a kernel that scales before it"
    )
    bucket_size: Annotated[int, Field(gt=0, strict=True)] | None = Field(
        default=None, description="elements in a bucket; left out: Megatron's formula"
    )
    optimizer_instances: Annotated[int, Field(gt=0, strict=True)] = Field(
        default=1, description="groups of ranks that each hold all optimizer states"
    )
    version: str = Field(
        default=NEWEST_CORE,
        description="the release of Megatron-Core, or Megatron-LM before it, whose behaviour applies",
    )
    engine: Engine = Field(
        default="megatron",
        description="whose code: Megatron's, or an engine with nearly the same data parallelism",
    )
    cuda_graph: StrictBool = Field(
        default=False,
        description="the whole step is one CUDA graph",
    )
    cuda_graph_modules: tuple[GraphModule, ...] = Field(
        default=(),
        description="parts of every layer that are CUDA graphs",
    )
    skips_update: StrictBool = Field(
        default=False, description="simulate a step whose gradients overflow: no update"
    )
    gradient_accumulation_fusion: StrictBool = Field(
        default=True, description="the weight-gradient product adds to the gradient buffer"
    )
    check_for_nan: StrictBool = Field(
        default=True, description="the host reads the norm of every bucket before it is reduced"
    )
    vocabulary_multiple: Annotated[int, Field(gt=0, strict=True)] = Field(
        default=VOCABULARY_MULTIPLE,
        description="the vocabulary is padded to a multiple of this, times the tensor-parallel ranks",
    )
    fsdp_sharding: FsdpSharding | None = Field(
        default=None,
        description="Megatron-FSDP, and what it shards; left out: Megatron's DDP, or its distributed "
        "optimizer",
    )
    fsdp_outer_sharding: Literal["no_shard", "optim"] = Field(
        default="no_shard",
        description="Megatron-FSDP in several instances: what is sharded over them as well",
    )
    fsdp_unit_size: Annotated[int, Field(gt=0, strict=True)] | None = Field(
        default=None,
        description="Megatron-FSDP: gradient elements in flight; twice as many are gathered ahead; "
        "left out: a billion, or two layers",
    )
    fsdp_double_buffer: StrictBool = Field(
        default=False, description="two persistent buffers for gathers and reductions"
    )
    fsdp_gather_group: StrictBool = Field(
        default=False, description="separate communicators for gathers and reductions"
    )
    gradient_reduce_div_fusion: StrictBool = Field(
        default=True, description="Megatron-FSDP: NCCL scales fp32 gradients as it sums"
    )
    keep_fp8_transpose_cache: StrictBool = Field(
        default=False, description="Megatron-FSDP keeps the transposed copies of fp8 weights"
    )
    precision_aware_optimizer: StrictBool = Field(
        default=False, description="Transformer Engine's optimizer, whose states may have fewer bits"
    )
    main_grads_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="gradients of the precision-aware optimizer"
    )
    main_params_dtype: Literal["fp32", "fp16"] = Field(
        default="fp32", description="master weights of the precision-aware optimizer"
    )
    exp_avg_dtype: StateDtype = Field(
        default="fp32", description="first moments of the precision-aware optimizer"
    )
    exp_avg_sq_dtype: StateDtype = Field(
        default="fp32", description="second moments of the precision-aware optimizer"
    )
    optimizer_offload_fraction: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="the CPU holds and updates this part of the optimizer's states; left out: the GPU all",
    )
    overlap_optimizer_offload: StrictBool = Field(
        default=False, description="the CPU updates tensor by tensor, while others' copies are under way"
    )
    overlap_p2p: StrictBool = Field(
        default=True, description="interleaved schedule: messages between stages overlap with work"
    )
    align_grad_reduce: StrictBool = Field(
        default=True,
        description="all pipeline ranks reduce a chunk's gradients at the same place of the schedule",
    )
    align_param_gather: StrictBool = Field(
        default=True,
        description="all pipeline ranks gather a chunk's parameters at the same place of the schedule",
    )
    overlap_p2p_warmup_flush: StrictBool = Field(
        default=False, description="messages overlap in warm-up and cool-down as well"
    )
    micro_batch_group: Annotated[int, Field(gt=0, strict=True)] | None = Field(
        default=None,
        description="micro-batches of a chunk before the next chunk; left out: pipeline ranks",
    )
    fp8_param_gather: StrictBool = Field(
        default=False, description="the weights of fp8 products are kept and gathered in fp8"
    )
    tp_only_amax_red: StrictBool = Field(
        default=False,
        description="reduce delayed scaling's maxima over tensor- and context-parallel ranks only",
    )
    rope_fusion: StrictBool = Field(
        default=True, description="rotary positions are Transformer Engine's kernel, not eager ones"
    )
    moe_grouped_gemm: StrictBool = Field(
        default=False, description="the products of all local experts run as one kernel"
    )
    moe_permute_fusion: StrictBool = Field(
        default=False, description="fused kernels permute tokens into the order of experts"
    )
    enable_experimental: StrictBool = Field(
        default=False,
        description="experimental kernels: with moe_permute_fusion and DeepEP no wait for the routing map",
    )
    moe_router_padding: StrictBool = Field(
        default=False,
        description="pad experts' rows for quantised products in the routing map, not by copies",
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = Field(
        default=None, description="the type of the router's product and scores; left out: the model's"
    )
    moe_aux_loss: StrictBool = Field(default=False, description="an auxiliary loss balances the experts")
    moe_pad_to_capacity: StrictBool = Field(default=False, description="pad every expert to its capacity")
    mtp_layers: Annotated[int, Field(ge=0, le=64, strict=True)] = Field(
        default=0, description="layers of multi-token prediction behind the model's own"
    )
    overlap_shared_experts: StrictBool = Field(
        default=False,
        description="shared experts run on a separate stream, during token exchanges",
    )
    overlap_expert_parallel: StrictBool = Field(
        default=False,
        description="overlap one micro-batch's token exchanges with another's layers",
    )
    delay_wgrad_compute: StrictBool = Field(
        default=False, description="compute weight gradients separately, with overlap_expert_parallel"
    )
    deterministic_mode: StrictBool = Field(
        default=False,
        description="deterministic kernels (FlashAttention-2's before Hopper, and on Blackwell with "
        "dropout); more host time",
    )
    distribute_saved_activations: StrictBool = Field(
        default=False,
        description="tensor-parallel ranks each keep a part of recomputed layers' inputs",
    )
    timing_log_level: Literal[0, 1, 2] = Field(
        default=0,
        description="with 2, timers wait for the device around every forward, backward and message",
    )
    test_mode: StrictBool = Field(
        default=False,
        description="forward compares norms of queries and keys between ranks",
    )
    layer_wise_optimizer: StrictBool = Field(
        default=False,
        description="Muon: whole tensors belong to ranks, which gather them after the update (dist_muon)",
    )
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = Field(
        default="blockwise",
        description="Muon under tensor parallelism: orthogonalise parts, the whole on each rank, or the "
        "whole together",
    )
    muon_split_qkv: StrictBool = Field(
        default=True, description="Muon: fused queries, keys and values are three matrices"
    )
    muon_num_ns_steps: Annotated[int, Field(ge=1, le=100, strict=True)] = Field(
        default=5, description="Muon: rounds of Newton-Schulz"
    )
    muon_fp32_matmul_prec: Literal["medium", "high"] = Field(
        default="medium", description="Muon: its products in bf16, or in tf32"
    )
    muon_nesterov: StrictBool = Field(default=False, description="Muon: Nesterov's momentum")
    muon_scalar_optimizer: Literal["adam", "lion"] = Field(
        default="adam", description="Muon: the optimizer of parameters that are not matrices"
    )
    transformer_impl: Literal["transformer_engine", "local"] = Field(
        default="transformer_engine",
        description="whose modules; Megatron's own need less host time",
    )

    @property
    def runs_transformer_engine(self) -> bool:
        """Whether the modules are Transformer Engine's."""
        return self.engine == "megatron" and self.transformer_impl == "transformer_engine"

    @field_validator("version", mode="before")
    @classmethod
    def _check_version_is_text(cls, value: object) -> object:
        if isinstance(value, int | float):
            raise ValueError(f'found the number {value}, expected a release in quotes, as in "{NEWEST_CORE}"')
        return value
