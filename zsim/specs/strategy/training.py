"""The training values that plans are made from."""

from __future__ import annotations

from typing import Literal

from zsim.dataclass import dataclass
from zsim.specs.strategy.fp8 import TORCHAO_TENSORWISE, Fp8
from zsim.specs.strategy.lengths import DrawnLengths

Precision = Literal["bf16", "fp16", "fp32", "fp8"]
# "selective" recomputes the core of attention (Korthikanti et al. 2022); "selective-op" keeps the outputs of
# every second matrix product and of fused attention and recomputes the rest (torchtitan's `op` policy).
Checkpointing = Literal["none", "selective", "selective-op", "full"]
# Megatron's --recompute-modules.
RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
AttentionKind = Literal["flash", "math"]
# "eager": transformers' own, through fp32 logits; "megatron": fp32 too, softmax and gradient in place
# ("megatron-before-0.8": with a copy more in forward; "megatron-fused": its compiled kernels);
# "autocast": torch's own on 16-bit logits under autocast; "unsloth": its kernel in transformers' loss;
# "fused": one kernel each way; "fused_linear": the LM head's product and the loss in chunks (Liger's).
CrossEntropy = Literal[
    "eager",
    "autocast",
    "megatron",
    "megatron-before-0.8",
    "megatron-fused",
    "unsloth",
    "fused",
    "fused_linear",
]

# "torch": torch.compile's; "megatron": Megatron-LM's, from its persistent norm of October 2021 on, which 3.0
# is the first release to have; "megatron-2": those before, with Apex's norm. Beside Liger's: "nanotron",
# which copies q, k and v and gates in eager kernels; "internevo", whose norms are in fp32.
LayerKernels = Literal["torch", "megatron", "megatron-2", "nanotron", "internevo"]

# CUDA_DEVICE_MAX_CONNECTIONS: 1 to 32, 8 if it is not set (CUDA Programming Guide, appendix on environment
# variables; without MPS).
DEFAULT_CONNECTIONS, MAX_CONNECTIONS = 8, 32


@dataclass(frozen=True, slots=True)
class Training:
    """The training values of one rank: `micro_batch_size` sequences of `sequence_length` tokens at a time.

    `checkpoint_every`: every n-th block is checkpointed, the others keep everything. `block_checkpointing`:
    the policy of each block if they differ, () if `activation_checkpointing` holds for all.
    `layers_per_checkpoint`: blocks of policy "full" share one checkpoint (Megatron's uniform method).
    `recompute_modules`: run again beside the core of attention, by Megatron's names.
    `checkpoint_stops_early`: recomputation ends once all that backward needs is there (torch's non-reentrant
    checkpoint from 2.1 on). `checkpoint_is_reentrant`: the block's second output is held until its backward
    has ended, as DeepSpeed, Megatron and transformers before 5 do. `autocast`: modules get fp32 weights and
    torch.autocast casts at every product, so norms and the residual stream are fp32. `stored_dtype`: the type
    in which DDP and FSDP1 keep weights, gradients and optimizer states (a model loaded in bf16 and trained so
    keeps nothing in fp32). `liger`: norms, rotary embedding and gated activations are one kernel each
    (linkedin/Liger-Kernel). `device_max_connections`: the hardware queues that streams share, as in
    `zsim.plan.passes.queues`. `paged_states`: where a paged optimizer's states are between steps;
    None: where the driver has them, as `zsim.plan.memory.paging` works out.
    `stochastic_rounding`: torchao's optimizers write bf16 weights so. `lengths`: where documents differ in
    length, of which `sequence_length` is then the slowest rank's. `fp8`: how products are cast with precision
    "fp8". `layer_kernels`: whose kernels the blocks have where they are `compile`d or Liger's.
    `deterministic_sms`: the multiprocessors of the GPU, among which FlashAttention-2's deterministic backward
    splits the keys of a head; 0 in another mode. `writes_scores`: fused attention's backward has a workspace
    of the gradients of all scores, as cuDNN's deterministic one on Hopper. `expands_groups`: attention with
    grouped heads is FlashAttention-2's CUDA kernel, whose backward makes gradients of keys and values for
    every query head before it sums them up. `calls_engine`: the blocks' products are layers of Transformer
    Engine. `has_fp32_stream`: the residual stream is fp32, since the embedding is, under autocast.
    """

    sequence_length: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    precision: Precision
    activation_checkpointing: Checkpointing
    attention: AttentionKind
    compile: bool
    optimizer: str
    gradient_clipping: float
    checkpoint_every: int = 1
    checkpoint_stops_early: bool = True
    checkpoint_is_reentrant: bool = False
    autocast: bool = False
    expandable_segments: bool = False
    stored_dtype: str = "fp32"
    paged_states: Literal["gpu", "host"] | None = None
    stochastic_rounding: bool = False
    optimizer_implementation: Literal["fused", "foreach", "for_loop"] = "fused"
    liger: bool = False
    cross_entropy: CrossEntropy = "eager"
    block_checkpointing: tuple[Checkpointing, ...] = ()
    device_max_connections: int = DEFAULT_CONNECTIONS
    fp8: Fp8 = TORCHAO_TENSORWISE
    layers_per_checkpoint: int = 1
    recompute_modules: tuple[str, ...] = ()
    lengths: DrawnLengths | None = None
    layer_kernels: LayerKernels = "torch"
    deterministic_sms: int = 0
    writes_scores: bool = False
    expands_groups: bool = False
    calls_engine: bool = False
    has_fp32_stream: bool = False

    def checkpointing_of(self, block: int) -> Checkpointing:
        """The policy of block number `block`, `checkpoint_every` included; "selective" applies to every
        block."""
        if self.block_checkpointing:
            return self.block_checkpointing[block]
        is_left_out = (block + 1) % self.checkpoint_every and self.activation_checkpointing != "selective"
        return "none" if is_left_out else self.activation_checkpointing

    @property
    def micro_batch_tokens(self) -> int:
        return self.sequence_length * self.micro_batch_size
