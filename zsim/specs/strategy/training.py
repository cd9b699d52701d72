"""The training values that plans are made from.

The kernels that `training.layer_kernels` and `training.cross_entropy` name.

torch's are in `zsim.cost.kernels`. Those of a framework are in the module `kernels` of its folder, in
`LAYER_KERNELS` and `LOSSES`, so another implementation is one more value there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from zsim.cost.kernels.layer_kernels import LayerKernelSet
from zsim.cost.kernels.losses import LOSSES, LossKernelSet
from zsim.specs.strategy.fp8 import TORCHAO_TENSORWISE, Fp8
from zsim.specs.strategy.images import SampledImages, SampledLengths
from zsim.specs.strategy.registry import kinds_with, role_of

_MODULE, _COMPILED = "kernels", LayerKernelSet()


@cache
def layer_kernel_sets() -> Mapping[str, LayerKernelSet]:
    """torch.compile's kernels of layers, and those in the folders of frameworks, by name."""
    return {_COMPILED.name: _COMPILED} | _sets_of_frameworks("LAYER_KERNELS")


@cache
def losses() -> Mapping[str, LossKernelSet]:
    """The implementations of cross-entropy by name, torch's before those in the folders of frameworks."""
    return LOSSES | _sets_of_frameworks("LOSSES")


def _sets_of_frameworks(table: str) -> dict[str, Any]:
    tables: Iterator[Mapping[str, Any]] = (role_of(kind, _MODULE, table, {}) for kind in kinds_with(_MODULE))
    return dict(chain.from_iterable(sets.items() for sets in tables))


Precision = Literal["bf16", "fp16", "fp32", "fp8"]
# "selective" recomputes the core of attention (Korthikanti et al. 2022); "selective-op" keeps the outputs of
# every second matrix product and of fused attention and recomputes the rest (torchtitan's `op` policy).
Checkpointing = Literal["none", "selective", "selective-op", "full"]
# How the inputs of recomputed blocks are copied to host memory and back.
CheckpointOffload = Literal["pageable", "pinned", "stream"]
# Megatron's --recompute-modules.
RecomputeModule = Literal[
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out"
]  # fmt: skip
AttentionKind = Literal["flash", "math"]
PaddingMask = Literal["bool", "scores"]
if TYPE_CHECKING:
    CrossEntropy = str
else:
    CrossEntropy = Literal[tuple(losses())]

if TYPE_CHECKING:
    LayerKernels = str
else:
    LayerKernels = Literal[tuple(layer_kernel_sets())]

# CUDA_DEVICE_MAX_CONNECTIONS: 1 to 32, 8 if it is not set (CUDA Programming Guide, appendix on environment
# variables; without MPS).
DEFAULT_CONNECTIONS, MAX_CONNECTIONS = 8, 32


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """The training values of one rank, which trains on `micro_batch_size` sequences at a time."""

    sequence_length: int
    """Tokens of a sequence. Where documents differ in length, these are the slowest rank's."""
    micro_batch_size: int
    gradient_accumulation_steps: int
    precision: Precision
    activation_checkpointing: Checkpointing
    attention: AttentionKind
    compile: bool
    optimizer: str
    gradient_clipping: float
    checkpoint_every: int = 1
    """Every n-th block is checkpointed. The others keep everything."""
    checkpoint_stops_early: bool = True
    """Recomputation ends once all that backward needs is there (torch's non-reentrant checkpoint from 2.1
    on).
    """
    checkpoint_is_reentrant: bool = False
    """The block's second output is held until its backward has ended, as transformers before 5 does."""
    autocast: bool = False
    """Modules get fp32 weights and torch.autocast casts at every product, so norms and the residual stream
    are fp32.
    """
    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    """MiB from which on torch's allocator splits no block. None if it splits all."""
    roundup_power2_divisions: int = 1
    """Parts of a power of two to which torch's allocator rounds sizes up. 1 if it does not."""
    stored_dtype: str = "fp32"
    """The type in which weights, gradients and optimizer states are kept (a model loaded in bf16 and trained
    so keeps nothing in fp32).
    """
    paged_states: Literal["gpu", "host"] | None = None
    """The memory that holds a paged optimizer's states between steps. None for the memory where the driver
    has them, as `zsim.plan.make` works out.
    """
    stochastic_rounding: bool = False
    """torchao's optimizers write bf16 weights with stochastic rounding."""
    optimizer_implementation: Literal["fused", "foreach", "for_loop"] = "fused"
    liger: bool = False
    """Norms, rotary embedding and gated activations are one kernel each (linkedin/Liger-Kernel)."""
    cross_entropy: CrossEntropy = "eager"
    block_checkpointing: tuple[Checkpointing, ...] = ()
    """The policy of each block if they differ. Empty if `activation_checkpointing` holds for all."""
    device_max_connections: int = DEFAULT_CONNECTIONS
    """The hardware queues that streams share, as in `zsim.plan.passes.hardware_queues`."""
    fp8: Fp8 = TORCHAO_TENSORWISE
    """The casts of products with precision "fp8"."""
    layers_per_checkpoint: int = 1
    """Blocks of policy "full" that share one checkpoint."""
    recompute_modules: tuple[str, ...] = ()
    """Modules that run again in addition to the core of attention."""
    checkpoint_offload: CheckpointOffload | None = None
    """How the inputs of recomputed blocks go to host memory. None where they stay on the GPU, or where the
    strategy says it.
    """
    mlp_tiles: int = 1
    """Parts of a rank's tokens in which MLPs are computed."""
    lengths: SampledLengths | None = None
    """The lengths of documents, where they differ."""
    images: SampledImages | None = None
    """The images of micro-batches, of a model with a tower of them."""
    sounds: SampledImages | None = None
    """The sounds of micro-batches, of a model with a tower of them."""
    tower_checkpointing: Checkpointing = "none"
    """The policy of a tower's blocks."""
    layer_kernels: LayerKernels = "torch"
    """The library whose kernels the blocks have where they are `compile`d or Liger's."""
    deterministic_sms: int = 0
    """The multiprocessors of the GPU, among which FlashAttention-2's deterministic backward splits the keys
    of a head. 0 in another mode.
    """
    writes_scores: bool = False
    """Fused attention's backward has a workspace of the gradients of all scores, as cuDNN's deterministic one
    on Hopper.
    """
    expands_groups: bool = False
    """Attention with grouped heads is FlashAttention-2's CUDA kernel, whose backward makes gradients of keys
    and values for every query head before it sums them up.
    """
    calls_engine: bool = False
    """The blocks' products are layers of Transformer Engine."""
    padding_mask: PaddingMask | None = None
    """The mask of padded sequences that is handed to fused attention, whose kernel then computes all pairs:
    of booleans, which each layer writes out as scores, or of scores, made once.
    """
    branches_on_4_bits: bool = False
    """bitsandbytes is older than 0.48, see [Note: 4-bit products] of `zsim.operations.linear`."""
    has_fp32_stream: bool = False
    """The residual stream is fp32, since the embedding is, under autocast."""
    reference: Literal["copy", "base"] | None = None
    """A frozen model runs forward on every micro-batch too: a copy of the model, or its base without
    adapters.
    """
    reference_forwards: int = 1
    """Forwards of a micro-batch without gradients, where there is a reference."""
    reference_dtype: str = ""
    """The type of a copy's weights. Empty for that of the trained weights."""
    forward_only: bool = False
    """Nothing is trained: a step is the forward of its micro-batches, as for the probabilities of tokens that
    another model has chosen.
    """

    def block_policy(self, block: int) -> Checkpointing:
        """The policy of block number `block`, `checkpoint_every` included. "selective" applies to every
        block.
        """
        if self.block_checkpointing:
            return self.block_checkpointing[block]
        is_skipped = (block + 1) % self.checkpoint_every and self.activation_checkpointing != "selective"
        return "none" if is_skipped else self.activation_checkpointing

    @property
    def num_reference_forwards(self) -> int:
        """Forwards of a micro-batch besides the trained model's."""
        return 0 if self.reference is None else self.reference_forwards

    @property
    def micro_batch_tokens(self) -> int:
        return self.sequence_length * self.micro_batch_size


HOPPER = 9.0  # compute capability
LARGE_WORKSPACE = 2**25
NUM_HANDLES = 2  # one per thread that multiplies: forward's and autograd's


def workspace_bytes(capability: float) -> int:
    """Bytes of the workspace of one handle on its stream: 2 x 4 MiB and 8 x 16 KiB, from Hopper on 32 MiB.

    torch holds them from 2.0 on, without `CUBLAS_WORKSPACE_CONFIG` (ATen/cuda/CublasHandlePool.cpp, and
    8,519,680 bytes after one product on an A10G: pytorch/pytorch issue 95668). Before, cuBLAS has its own of
    about as much.
    """
    return LARGE_WORKSPACE if capability >= HOPPER else 2 * 2**22 + 8 * 2**14
