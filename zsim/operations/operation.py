"""A module of a model and its operation: what it computes in each pass, what autograd keeps of it.

`Operation` is the base of all operations, a module of this package each. Its answers are those of an
elementwise operation that launches nothing and keeps nothing, so that a further one says only what differs.
The amounts depend on the module as well: whether it is trained, whether its input is kept already.

HBM bytes are every operand read once and every result written once, as in eager PyTorch. Fused kernels
(`compile`) save the traffic between operators. Elementwise kernels have no FLOPs: they are bound by HBM.

Bytes follow Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198), section 4.1: every tensor that a module's backward needs is counted once, at the module that
needs it, and masks take one byte. With b sequences of s tokens, hidden size h, a heads and 2-byte activations
its block with dropout and written-out attention keeps

    s b h (34 + 5 a s / h) bytes =
        2sbh norm + 2sbh qkv input + 6sbh q, k, v + 5as^2b softmax, its mask, its output
      + 2sbh projection input + sbh mask + 2sbh norm + 2sbh MLP input + 8sbh GELU + 8sbh its output + sbh mask

Adapted: grouped queries keep k and v of g < a heads. A gated MLP of width f keeps gate, up and their product,
6sbf bytes (8sbf in eager mode, which keeps act(gate) too). Fused attention keeps q, k, v and 4 bytes of
log-sum-exp per head and token in place of everything with s^2 (its output is the projection's input). Eager
Hugging Face code keeps more than the paper where it is written in Python: see `norm_cost` and
`activation_cost`. Norm statistics are neglected, as in the paper. The loss is in `zsim.cost.kernels.losses`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from math import prod
from typing import Literal, TypeVar

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.sharding import ContextSharding, FeatureCut
from zsim.operations.tensors import ModuleTensors, Sizes, split_into_tensors
from zsim.specs.strategy.images import SampleRows

Kernels = tuple[Kernel, ...]
HEAD = "lm_head"
_ENCODERS_HEAD = "cls."
_OperationKind = TypeVar("_OperationKind", bound="Operation")


class Pass(Enum):
    """A pass over a module."""

    FORWARD = auto()
    BACKWARD = auto()
    """Gradients of the input and of the parameters, in the order in which autograd makes them."""
    BACKWARD_INPUT = auto()
    """The part of backward that the gradient of the input needs, where a schedule splits it."""
    BACKWARD_WEIGHT = auto()
    """The part of backward for the weight's gradient alone, which a schedule may run later."""
    RECOMPUTE = auto()
    """The part of forward that recomputation repeats although the module's output was kept."""


class Role(Enum):
    """The part that an operation has in a model."""

    EMBEDDING = auto()
    PRODUCT = auto()
    """A product with a weight."""
    NORM = auto()
    MIXER = auto()
    """The core of a layer in which tokens see each other (attention's)."""
    ACTIVATION = auto()
    RESIDUAL = auto()
    LOSS = auto()
    EXCHANGE = auto()
    """A collective in line with the modules."""
    ROUTER = auto()
    EXPERTS = auto()
    """All routed experts of a layer, as a model's file states them."""
    EXPERT_PRODUCT = auto()
    """A product of routed experts."""
    OTHER = auto()


FORWARD, BACKWARD = Pass.FORWARD, Pass.BACKWARD
BACKWARD_INPUT, BACKWARD_WEIGHT, RECOMPUTE = Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT, Pass.RECOMPUTE


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor, in the framework's layout (FSDP2 shards its first dimension)."""

    name: str
    shape: tuple[int, ...]
    summed_over: str = ""
    """The kind of group whose ranks each compute a part of its gradient, from their part of the tokens
    ("tensor").
    """
    trainable: bool = True
    """`requires_grad`. A frozen parameter has no gradient and no optimizer states."""
    rank_kind: str = ""
    """The kind of ranks that have it, where they are others than those of data parallelism ("expert_data").
    Its gradient is reduced over them.
    """
    stored_dtype: str = ""
    """The type it is kept in, if that is not the framework's: "fp32", "bf16", "nf4" or "nf4-single" (4 bits,
    with scales that are quantised again or not), "int8" (LLM.int8's).
    """
    in_fp8: bool = False
    """A product reads it quantised."""
    original_dtype: str = ""
    """The type of a frozen original that PEFT keeps in addition and nothing reads, "as stored" for the
    parameter's own. Empty if there is none.
    """

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_packed(self) -> bool:
        """Whether it is kept in 4 bits."""
        return self.stored_dtype.startswith("nf4")


@dataclass(frozen=True, slots=True)
class Operation:
    """The work of a module on its input. Widths are in elements per token."""

    # -- roles ---------------------------------------------------------------------------------------------

    @property
    def role(self) -> Role:
        """The part that it has in a model."""
        return Role.OTHER

    @property
    def scatters_output(self) -> bool:
        """Whether its output is reduce-scattered by itself."""
        return False

    @property
    def is_merged(self) -> bool:
        """Whether its weight is a sum with adapters', so that it gets a gradient though it is frozen."""
        return False

    @property
    def may_borrow_weight(self) -> bool:
        """Whether a module without a weight multiplies by another module's (a tied head)."""
        return False

    @property
    def casts_at_products(self) -> bool:
        """Whether it computes in the training's type between casts where input and output are fp32."""
        return False

    @property
    def is_function(self) -> bool:
        """Whether models' code has it as a function and not as a module."""
        return False

    @property
    def is_adapter_part(self) -> bool:
        """Whether it is a part of a low-rank adapter beside its products."""
        return False

    @property
    def product_features(self) -> tuple[int, int]:
        """Features of the input and of the output of a product that reads tokens."""
        return (0, 0)

    @property
    def is_gate(self) -> bool:
        """Whether it is a product that makes one number per token."""
        return False

    @property
    def gathers_input(self) -> bool:
        """Whether its forward gathers its input in pieces."""
        return False

    @property
    def host_waits(self) -> bool:
        """Whether the host reads from the GPU before it launches the kernels."""
        return False

    @property
    def weight_numel(self) -> int:
        """Elements of the weight that it multiplies by or looks up, its own or another's."""
        return 0

    @property
    def num_weights(self) -> int:
        """Weights that a framework may hold as tensors of their own."""
        return 1

    @property
    def active_fraction(self) -> float:
        """The part of its parameters that is active for one token."""
        return 1.0

    @property
    def takes_fp8(self) -> bool:
        """Whether it is a product whose dimensions fp8 kernels take."""
        return False

    @property
    def reads_adapted_input(self) -> bool:
        """Whether it is the part of an adapter that reads the adapted product's input."""
        return False

    @property
    def keeps_input_type(self) -> bool:
        """Whether it gives back the type that it gets, be that wider than the training's."""
        return False

    @property
    def is_latent(self) -> bool:
        """Whether it is attention whose queries and keys are put together of parts."""
        return False

    @property
    def saves_nothing(self) -> bool:
        """Whether its backward needs nothing of forward."""
        return False

    @property
    def mixer_title(self) -> str:
        """The name in sentences of a mixer other than attention. Empty for other operations."""
        return ""

    @property
    def is_run_again(self) -> bool:
        """Whether selective recomputation runs it again: the core of attention."""
        return self.role is Role.MIXER

    @property
    def is_inner(self) -> bool:
        """Whether it is a part of a mixer between the products before and after it, cut along its features
        with them.
        """
        return False

    @property
    def is_duplicated(self) -> bool:
        """Whether all tensor-parallel ranks have it whole though it stands between products that are cut."""
        return False

    @property
    def needs_sparse_kernels(self) -> bool:
        """Whether it is attention over chosen keys, which few frameworks have kernels of."""
        return False

    @property
    def residual_streams(self) -> int:
        """Streams of the residual that it mixes: hyper-connections have several."""
        return 1

    @property
    def split_counts(self) -> tuple[tuple[str, int], ...]:
        """Names and counts of the heads, groups or channels that ranks divide among each other."""
        return ()

    @property
    def exchanged_inputs(self) -> tuple[int, ...]:
        """Elements per token of each tensor that ranks which share sequences exchange before a mixer, heads
        for tokens.
        """
        return ()

    @property
    def exchanged_outputs(self) -> tuple[int, ...]:
        """Elements per token of each tensor that they exchange back after it."""
        return ()

    def is_replicated(self, parameter: Parameter) -> bool:
        """Whether all tensor-parallel ranks have a parameter that is between a column and a row."""
        return False

    @property
    def counts_products(self) -> bool:
        """Whether it has products for which the convention of model FLOPs has no formula."""
        return False

    def saves_only_its_input(self, options: WorkOptions) -> bool:
        """Whether backward needs its input alone."""
        return False

    def overwrites_input(self, options: WorkOptions) -> bool:
        """Whether its kernel writes over an input that is not needed later."""
        return False

    def cut_features(self, cut: FeatureCut) -> Operation:
        """One tensor-parallel rank's part of an operation between a product cut along its outputs and one cut
        along its inputs.
        """
        return self

    def cut_sequences(self, sharding: ContextSharding) -> Operation:
        """The operation on a rank that has a part of every sequence."""
        return self

    def split_fused_projection(self) -> Operation:
        """The operation where its inputs are slices of one projection's output."""
        return self

    def keep_in_bf16(self) -> Operation:
        """The operation left out of fp8 training."""
        return self

    def unmark_fp8(self) -> Operation:
        """The operation without what fp8 training marks."""
        return self

    def is_quantized(self, module: Module, options: WorkOptions) -> bool:
        """Whether its products run in fp8 or fp4."""
        return False

    # -- work ----------------------------------------------------------------------------------------------

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The kernels of forward, in order."""
        return ()

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The kernels of backward, in order."""
        return ()

    def input_gradient_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The kernels of backward that the gradient of the input needs. An operation without a product is not
        split.
        """
        return self.backward_kernels(module, shape, options)

    def weight_gradient_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The kernels of backward for the weight's gradient alone."""
        return ()

    def recomputed_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The kernels of forward that recomputation repeats although the output was kept."""
        return ()

    def forward_flops(self, module: Module, sequence_length: int) -> float:
        """FLOPs of forward's matrix products per token: 2 m n k each, attention over all pairs."""
        return 0.0

    def masked_fraction(self, sequence_length: int) -> float:
        """The part of the pairs of tokens that `forward_flops` counts though a mask leaves them out."""
        return 0.0

    def training_flops(self, module: Module, sequence_length: int) -> float:
        """FLOPs of matrix products forward and backward per token."""
        return 3.0 * self.forward_flops(module, sequence_length)

    # -- memory --------------------------------------------------------------------------------------------

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """Bytes kept from forward to backward by a module that has a backward."""
        return 0

    def saved_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """Bytes kept from forward to backward."""
        return self.kept_bytes(module, shape, options) if module.has_backward else 0

    def selective_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """`saved_bytes` under selective recomputation (Korthikanti et al. 2022, section 5)."""
        return module.saved_bytes(shape, options)

    def quantized_input_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """Bytes of a quantised input that is not kept already, once for the products that share it, of the
        rank's own part where it is gathered.
        """
        return 0

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """Bytes allocated during forward beyond those kept: the output and the largest temporaries."""
        return 0

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """Bytes allocated during backward: gradients of output and input, and temporaries. The gradient of
        the residual stream and the gradients of parameters are not included.
        """
        return 0

    def shared_input_bytes(
        self, output_bytes: int, shape: BatchShape, options: WorkOptions, *, is_last: bool
    ) -> int:
        """Bytes of the output of a product before a mixer, the `is_last` one or not, that are among those
        that the mixer keeps.
        """
        return output_bytes

    def kept_outputs(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        """Bytes of each tensor of the output that a checkpoint which keeps outputs holds."""
        raise AssertionError(f"no checkpoint keeps the output of {self}")

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        """The sizes of tensors that the bytes above are sums of, as far as they are known."""
        return ModuleTensors()

    def tensors(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        """The bytes above cut into tensors: the sizes that an allocator is asked for. Bytes that no rule
        covers stay one tensor.
        """
        sizes = self.tensor_sizes(module, shape, options)
        return ModuleTensors(
            split_into_tensors(module.saved_bytes(shape, options), sizes.saved),
            split_into_tensors(module.forward_extra_bytes(shape, options), sizes.forward),
            split_into_tensors(module.backward_extra_bytes(shape, options), sizes.backward),
        )


@dataclass(frozen=True)
class Module:
    """A leaf module: its operation and the parameters it owns, in registration order."""

    name: str
    """The name relative to the block (`self_attn.q_proj`), or the full name outside the blocks
    (`model.norm`).
    """
    op_spec: Operation
    parameters: tuple[Parameter, ...] = ()
    shares_input: bool = False
    """The input is a tensor that an earlier module of the block already keeps for backward (k_proj and v_proj
    read the input of q_proj), so keeping it costs no extra memory.
    """
    token_shards: int = 1
    """The number of parts that the micro-batch's tokens are cut into, of which the module sees one (sequence
    and context parallelism).
    """
    rows_per_token: float = 1.0
    """Rows that the module sees for each of these tokens (a token goes to several experts)."""
    host_waits: bool = False
    """The host reads from the GPU before it launches the module's forward (how many rows each expert has)."""
    backward_waits: bool = False
    """The host reads from the GPU before it launches the module's backward."""
    input_gradient: bool = True
    """The input needs a gradient, because something before it is trained."""
    borrows_frozen: bool = False
    """The module multiplies by another module's weight (a tied head), which is frozen."""
    lender: str = ""
    """Full name of the module of an earlier block whose parameters it uses, where layers share a block."""
    parameter_owner: str | None = None
    """The module that the parameters belong to, where that is not `name`: the module is a function in a
    container, between its children (empty: in the block, or the model).
    """
    side_stream: Literal["", "forks", "begins", "continues", "ends", "joins"] = ""
    """The relation to modules on a stream of their own: the module forks them, begins, continues or ends
    them, or joins them.
    """
    is_first_in_backward: bool = False
    """Autograd comes back to the module as soon as it can."""
    in_fp32: bool = False
    """Inputs and outputs are fp32, though products are of 16 bits."""
    sample_rows: SampleRows = ""
    """The rows of images or sounds that a module of a tower sees. Empty for modules that see the tokens of
    sequences.
    """

    @property
    def role(self) -> Role:
        """The part that its operation has in a model."""
        return self.op_spec.role

    @cached_property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    def path_of(self, parameter: Parameter) -> str:
        """A parameter's name, relative to the block."""
        return join_names(self.name if self.parameter_owner is None else self.parameter_owner, parameter.name)

    @cached_property
    def trainable_numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters if parameter.trainable)

    @cached_property
    def trainable_parameters(self) -> tuple[Parameter, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    @property
    def is_idle(self) -> bool:
        """Whether it has parameters for other modules alone, and never runs."""
        return type(self.op_spec) is Operation

    @property
    def has_weight(self) -> bool:
        """Whether the weight that it multiplies by is its own."""
        return any(_is_weight(parameter) for parameter in self.parameters)

    @property
    def has_bias(self) -> bool:
        return any(parameter.name == "bias" for parameter in self.parameters)

    @property
    def is_adapter_product(self) -> bool:
        """Whether it is one of the two products of a low-rank adapter."""
        return ".lora_" in self.name

    @property
    def is_adapter_part(self) -> bool:
        """Whether it is a part of a low-rank adapter."""
        return self.op_spec.is_adapter_part or self.is_adapter_product

    @cached_property
    def trains_weight(self) -> bool:
        """Whether the weight that it multiplies by gets a gradient."""
        if self.op_spec.is_merged:
            return True
        weights = [parameter for parameter in self.parameters if _is_weight(parameter)]
        return weights[0].trainable if weights else not self.borrows_frozen

    @property
    def has_backward(self) -> bool:
        """Whether autograd runs its backward, because its input or one of its parameters needs a gradient."""
        is_tied = self.op_spec.may_borrow_weight and self.trains_weight
        return self.input_gradient or self.trainable_numel > 0 or is_tied

    def is_quantized(self, options: WorkOptions) -> bool:
        """Whether its products run in fp8 or fp4."""
        return self.op_spec.is_quantized(self, options)

    def runs_in_transformer_engine(self, options: WorkOptions) -> bool:
        """Whether a product in 16 bits is one that Transformer Engine calls: of Megatron's blocks
        (Megatron-LM d98e8a64 core/models/backends.py), but not of adapters (Megatron-Bridge
        src/megatron/bridge/peft/utils.py `ParallelLinearAdapter`), and not of heads: those are Megatron's own
        layers, which call torch.matmul (core/models/gpt/gpt_model.py `output_layer`,
        core/tensor_parallel/layers.py `_linear_forward`).
        """
        if not options.calls_engine or self.is_adapter_product:
            return False
        return not (HEAD in self.name or self.name.startswith(_ENCODERS_HEAD))

    def work_options(self, options: WorkOptions) -> WorkOptions:
        """How it computes under `options`, where its input and output may be fp32."""
        is_fp32 = self.in_fp32 and not self.op_spec.casts_at_products
        return replace(options, dtype="fp32") if is_fp32 else options

    def kernels(self, in_pass: Pass, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The kernels of a pass, in order. Those of backward are () where nothing needs a gradient."""
        operation = self.op_spec
        if in_pass is FORWARD:
            return operation.forward_kernels(self, shape, options)
        if in_pass is RECOMPUTE:
            return operation.recomputed_kernels(self, shape, options)
        if not self.has_backward:
            return ()
        if in_pass is BACKWARD:
            return operation.backward_kernels(self, shape, options)
        if in_pass is BACKWARD_INPUT:
            return operation.input_gradient_kernels(self, shape, options)
        return operation.weight_gradient_kernels(self, shape, options)

    def forward_flops(self, sequence_length: int) -> float:
        """FLOPs of forward's matrix products per token."""
        return self.op_spec.forward_flops(self, sequence_length)

    def training_flops(self, sequence_length: int) -> float:
        """FLOPs of matrix products forward and backward per token."""
        return self.op_spec.training_flops(self, sequence_length)

    def saved_bytes(self, shape: BatchShape, options: WorkOptions) -> int:
        """Bytes that it keeps from forward to backward."""
        return self.op_spec.saved_bytes(self, shape, options)

    def selective_bytes(self, shape: BatchShape, options: WorkOptions) -> int:
        """`saved_bytes` under selective recomputation."""
        return self.op_spec.selective_bytes(self, shape, options)

    def forward_extra_bytes(self, shape: BatchShape, options: WorkOptions) -> int:
        """Bytes that it allocates during forward beyond `saved_bytes`."""
        return self.op_spec.forward_extra_bytes(self, shape, options)

    def backward_extra_bytes(self, shape: BatchShape, options: WorkOptions) -> int:
        """Bytes that it allocates during backward."""
        return self.op_spec.backward_extra_bytes(self, shape, options) if self.has_backward else 0

    def tensors(self, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        """The tensors whose bytes `saved_bytes`, `forward_extra_bytes` and `backward_extra_bytes` count."""
        return self.op_spec.tensors(self, shape, options)


def _is_weight(parameter: Parameter) -> bool:
    """Whether it is the weight of its module, as also `mm_input_projection_weight` of Gemma 3's projector."""
    return parameter.name.endswith("weight")


def join_names(prefix: str, name: str) -> str:
    """`prefix.name`, or whichever of the two is not empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def operations_of(modules: Iterable[Module], kind: type[_OperationKind]) -> list[_OperationKind]:
    """The operations of one kind among those of `modules`."""
    return [module.op_spec for module in modules if isinstance(module.op_spec, kind)]
