"""The batch shape and the options on which the kernels and bytes of a module depend."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from zsim.cost.kernels.layer_kernels import LayerKernelSet
from zsim.cost.kernels.losses import EAGER, LossKernelSet
from zsim.specs.strategy.fp8 import TORCHAO_TENSORWISE, Fp8
from zsim.specs.strategy.images import SOUND_ROWS, SampledImages, SampleRows
from zsim.specs.strategy.training import (
    AttentionKind,
    PaddingMask,
    Precision,
    TrainingConfig,
    layer_kernel_sets,
    losses,
)


class TokenPart(Protocol):
    """The part of a micro-batch's tokens that a module sees, and its rows for each."""

    @property
    def token_shards(self) -> int: ...

    @property
    def rows_per_token(self) -> float: ...

    @property
    def sample_rows(self) -> SampleRows: ...


@dataclass(frozen=True, slots=True)
class BatchShape:
    """One micro-batch, or the part of its tokens that one of `shards` ranks has."""

    sequences: int
    sequence_length: int
    shards: int = 1
    rows_per_token: float = 1.0
    """Rows for each of these tokens, which count as tokens (a token goes to several experts)."""
    span: float | None = None
    """The mean length of the document that a token is of, where a sequence holds several and attention keeps
    them apart.
    """
    documents: float = 0.0
    """The documents of the micro-batch, where attention keeps them apart."""
    images: SampledImages | None = None
    """The images that the micro-batch's sequences have, where the model has a tower of images."""
    sounds: SampledImages | None = None
    """The sounds that they have, where it has a tower of sounds."""

    @property
    def tokens(self) -> int:
        local_tokens = self.sequences * self.sequence_length // self.shards
        return local_tokens if self.rows_per_token == 1.0 else round(local_tokens * self.rows_per_token)

    def split(self, shards: int) -> BatchShape:
        """The part of one of `shards` ranks."""
        return self if shards == 1 else replace(self, shards=self.shards * shards)

    def seen_by(self, module: TokenPart) -> BatchShape:
        """The part of the micro-batch's tokens, or the rows, that a module sees."""
        local_shape = self.split(module.token_shards)
        samples = self.sounds if module.sample_rows in SOUND_ROWS else self.images
        if module.sample_rows and samples is not None:
            local_shape = _image_shape(self, samples, module)
        return (
            local_shape
            if module.rows_per_token == 1.0
            else replace(local_shape, rows_per_token=module.rows_per_token)
        )

    @classmethod
    def of(cls, training: TrainingConfig) -> BatchShape:
        lengths = training.lengths
        span, documents = None, 0.0
        if lengths is not None and lengths.masks_by_document:
            span, documents = lengths.span, lengths.documents
        return cls(
            training.micro_batch_size, training.sequence_length, span=span, documents=documents,
            images=training.images, sounds=training.sounds,
        )  # fmt: skip


def _image_shape(shape: BatchShape, images: SampledImages, module: TokenPart) -> BatchShape:
    """The rows of a micro-batch's images, as sequences of rows that see each other. Where their number is no
    whole one, those are spans of one sequence.
    """
    rows, span = images.rows(module.sample_rows, shape.sequences)
    if rows % span == 0 and span == round(span):
        return BatchShape(round(rows / span), round(span), module.token_shards)
    return BatchShape(1, max(1, round(rows)), module.token_shards, span=min(span, rows))


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """How the modules compute. Fields without a sentence are those of the training."""

    dtype: Precision = "bf16"
    attention: AttentionKind = "flash"
    """`flash` is one fused kernel that keeps no scores. `math` writes the scores to memory."""
    compile: bool = False
    """False launches the kernels of Hugging Face's eager Python. True is one kernel per norm, activation,
    softmax and rotary, with the residual add inside the norm (torch.compile, or a library of fused kernels).
    """
    autocast: bool = False
    """Weights, norms and the residual stream are fp32, and products cast their operands."""
    liger: bool = False
    """Like `compile` for norms, gated activations and rotary, but the residual add is a separate kernel."""
    loss: LossKernelSet = EAGER
    fp8: Fp8 = TORCHAO_TENSORWISE
    """The casts around products with dtype "fp8"."""
    micro_batches: int = 1
    """Micro-batches per step, for what is cast once a step."""
    layers: LayerKernelSet = field(default_factory=LayerKernelSet)
    """The library whose fused kernels `compile` stands for. Beside some libraries' it is `liger` that stands
    for them.
    """
    deterministic_sms: int = 0
    writes_scores: bool = False
    expands_groups: bool = False
    calls_engine: bool = False
    has_fp32_stream: bool = False
    padding_mask: PaddingMask | None = None
    branches_on_4_bits: bool = False

    @classmethod
    def of(cls, training: TrainingConfig) -> WorkOptions:
        """How the modules compute under a training."""
        derived: dict[str, Any] = {
            "dtype": training.precision,
            "loss": losses()[training.cross_entropy],
            "micro_batches": training.gradient_accumulation_steps if training.precision == "fp8" else 1,
            "layers": layer_kernel_sets()[training.layer_kernels],
        }
        names = (each.name for each in fields(cls) if each.name not in derived)
        return cls(**{name: getattr(training, name) for name in names}, **derived)

    @property
    def joins_norms(self) -> bool:
        """Whether the residual add and its dropout are in the next norm's kernel, and the scores' dropout in
        that of softmax."""
        return self.compile and self.layers.joins_norms

    @property
    def fuses_kernels(self) -> bool:
        """Whether norms, activations and rotary embeddings are one kernel each."""
        return self.compile or self.liger

    @property
    def stream_bytes(self) -> int:
        """Bytes of one element of the residual stream and of the inputs of norms."""
        return 4 if self.autocast or self.has_fp32_stream else self.activation_bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation. fp8 training keeps activations in bf16 and casts at the products."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def kernel_dtype(self) -> str:
        """The type of everything but fp8 products."""
        return "bf16" if self.dtype == "fp8" else self.dtype
