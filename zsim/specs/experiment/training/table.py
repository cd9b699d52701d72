"""`[training]`: the batch, the types and kernels of its products, what is recomputed, the optimizer."""

# See [Note: annotations of tables].

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from zsim.specs.experiment.data.images import AudioTable, ImagesTable
from zsim.specs.experiment.data.lengths import LengthsTable
from zsim.specs.experiment.training.lora_table import LoraTable
from zsim.specs.lazy_model import Lazy, StrictTable
from zsim.specs.strategy.fp8 import Fp8Recipe
from zsim.specs.strategy.requirement import left_out, phrase
from zsim.specs.strategy.table import Count
from zsim.specs.strategy.training import (
    DEFAULT_CONNECTIONS,
    MAX_CONNECTIONS,
    Checkpointing,
    CheckpointOffload,
    CrossEntropy,
    LayerKernels,
    Precision,
    RecomputeModule,
)
from zsim.units import Length

AttentionChoice = Literal[
    "flash", "flash1", "flash1-triton", "flash2", "flash2-deterministic", "flash3", "flash4", "efficient",
    "cudnn", "cudnn-deterministic", "math",
]  # fmt: skip
NEWEST = "5.23"
"""The newest transformers."""
LAST_OF_MODULES = "4.57"
"""The last transformers in which every routed expert has modules of its own."""


class TrainingTable(StrictTable):
    """`[training]`. `liger` is linkedin/Liger-Kernel."""

    @model_validator(mode="before")
    @classmethod
    def _sizes_by_type(cls, data: Any) -> Any:
        """`micro_batch_size = { dgx-h100 = 4, dgx-a100-80gb = 2 }` is `micro_batch_sizes`."""
        if isinstance(data, Mapping) and isinstance(data.get("micro_batch_size"), Mapping):
            other_keys = {key: value for key, value in data.items() if key != "micro_batch_size"}
            return {"micro_batch_sizes": data["micro_batch_size"], **other_keys}
        return data

    @property
    def has_4_bits(self) -> bool:
        """Whether frozen weights are in bitsandbytes' 4 bits."""
        return self.lora is not None and self.lora.quantized == "nf4"

    @model_validator(mode="after")
    def _check_allocator(self) -> Self:
        divisions = self.roundup_power2_divisions
        if divisions & (divisions - 1):
            raise ValueError(f"roundup_power2_divisions: found {divisions}, expected a power of two")
        if self.max_split_size_mb is not None and self.expandable_segments:
            raise ValueError(
                f"max_split_size_mb: found {self.max_split_size_mb} with expandable_segments, which is not "
                "simulated; expected one of them"
            )
        return self

    @field_validator("software", mode="before")
    @classmethod
    def _joins_software(cls, value: object) -> object:
        """Several are a list, or one text with commas. A year may lack its quotes."""
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return ", ".join(value)
        return str(value) if type(value) is int else value

    @field_validator("transformers", mode="before")
    @classmethod
    def _reads_release(cls, value: object) -> object:
        """The release as text, of one without quotes, such as 4.51, too. 4 alone is the last of its kind."""
        release = str(value) if type(value) in (int, float) else value
        if isinstance(release, str) and not re.fullmatch(r"[345](\.\d{1,3}){0,2}", release):
            raise ValueError(
                f"found '{release}', expected a release of Hugging Face's transformers, as in '{NEWEST}' or "
                f"'{LAST_OF_MODULES}'"
            )
        return LAST_OF_MODULES if release == "4" else release

    sequence_length: Length | None = Field(
        default=None, description="tokens of a sequence; left out: the model's longest up to 4096"
    )
    micro_batch_size: Count | None = Field(
        default=None,
        description="sequences that a data-parallel rank computes at a time; left out: 1, or "
        f"{phrase('a value of its file')}",
    )
    micro_batch_sizes: dict[str, Count] = Field(
        default={}, description="sequences in a micro-batch by type of the cluster's nodes, where they differ"
    )
    gradient_accumulation_steps: Count | None = Field(
        default=None,
        description="micro-batches of a step; left out: by `global_batch_size`, "
        f"{phrase('a value of its file')}, else 1",
    )
    global_batch_size: Count | None = Field(
        default=None,
        description="sequences of a step of all ranks; the last micro-batch may be smaller; left out: "
        "from the sizes above",
    )
    sequences_per_sample: Count = Field(
        default=1,
        description="sequences of one of `cost.samples`: 2 for preferences, a chosen and a rejected one",
    )
    precision: Precision | None = Field(
        default=None, description="the type of products; left out: bf16 where the GPU has it"
    )
    fp8_recipe: Fp8Recipe | None = Field(
        default=None,
        description='scaling recipe and kernels of precision "fp8"; left out: '
        f"{left_out('training.fp8_recipe')}",
    )
    """A given recipe implies precision "fp8". The default under Megatron is that of its command line."""
    lengths: Lazy[LengthsTable] | None = Field(
        default=None, description="documents of different lengths, packed or padded"
    )
    images: Lazy[ImagesTable] | None = Field(
        default=None,
        description="images of samples, of a model with a vision tower; left out: one smallest image in each "
        "micro-batch",
    )
    audio: Lazy[AudioTable] | None = Field(
        default=None,
        description="sounds of samples, of a model with an audio tower; left out: one of 1.28 seconds in "
        "each micro-batch",
    )
    bf16_first_layers: int = Field(
        default=0, ge=0, strict=True, description="first layers kept in bf16 under fp8"
    )
    bf16_last_layers: int = Field(
        default=0, ge=0, strict=True, description="last layers kept in bf16 under fp8"
    )
    activation_checkpointing: Checkpointing = Field(
        default="none",
        description="recomputed in backward: nothing, the core of attention, every second product, or "
        "whole blocks",
    )
    attention: AttentionChoice | None = Field(
        default=None,
        description="attention kernel; math: not fused; left out: the best in the GPU's file",
    )
    """The default is flash where the GPU supports it, of the generation that its file is calibrated for. That
    is FlashAttention-2 on NVIDIA's GPUs. "flash3" on Hopper and "flash4" on Blackwell are asked for by name.
    The default is "cudnn" under Megatron on Hopper and Blackwell. It is also "cudnn" under torch on Hopper
    where torch's scaled_dot_product_attention takes cuDNN's. That is so in torch 2.11 and later for attention
    that is causal or has no mask, without documents kept apart, with heads up to 128 wide or 192 with values
    of 128, and with dropout in sixteenths. Under Megatron in deterministic mode the default is
    "flash2-deterministic" before Hopper, and on Blackwell where scores are dropped out. On Hopper it is
    "cudnn-deterministic". "efficient" is torch's memory-efficient kernel. It is the default before Ampere
    from transformers 4.36 on, and where transformers pads micro-batches, unless cuDNN's takes the mask.
    """
    software: str | None = Field(
        default=None,
        description="releases whose defaults other keys have: "
        f"{phrase('training.software')}; left out: the default of each key",
    )
    """The defaults are those of `presets/software.toml`."""
    transformers: str | None = Field(
        default=None,
        description="release of transformers: up to 4.57 experts run one by one, from 5 on stacked; padding "
        "masks change with 4.53, and bitsandbytes' 4 bits with 4.57; left out: "
        f"{left_out('training.transformers')}",
    )
    compile: bool = Field(default=False, description="torch.compile of blocks")
    layer_kernels: LayerKernels | None = Field(
        default=None,
        description=f"whose fused kernels compiled blocks have: {phrase('training.layer_kernels')}; left "
        "out: the framework's",
    )
    liger: bool = Field(
        default=False, description="Liger's fused kernels, as transformers' `use_liger_kernel`"
    )
    cross_entropy: CrossEntropy | None = Field(
        default=None, description="whose kernels compute the loss; left out: those of the framework"
    )
    """The default is "fused_linear" with Liger, "megatron" under Megatron, "fused" with `compile`, and else
    "eager".
    """
    optimizer: str = Field(
        default="adamw", description="by name, as docs/recipes/lora-and-small-optimizers.md lists them"
    )
    lora: Lazy[LoraTable] | None = None
    reference: Literal["copy", "base"] | None = Field(
        default=None,
        description="reference model, as in DPO: a frozen copy, or the base without adapters; left out: none",
    )
    reference_forwards: Count = Field(
        default=1,
        description="reference's forward passes per micro-batch; KTO: 3",
    )
    labels: Count | None = Field(
        default=None,
        description="outputs of the head: 1 for a reward model, or classes; left out: the vocabulary",
    )
    frozen: tuple[str, ...] = Field(
        default=(),
        description='modules not trained, with wildcards: "model.embed_tokens"',
    )
    frozen_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None,
        description="type of frozen weights; left out: that of trained weights, under LoRA `precision`",
    )
    paged_states: Literal["gpu", "host"] | None = Field(
        default=None,
        description="where a paged optimizer's states are between steps; left out: on the GPU if they "
        "fit, else the host",
    )
    stochastic_rounding: bool = Field(
        default=False, description="torchao's optimizers round bf16 weights stochastically"
    )
    gradient_clipping: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="norm that gradients are clipped to, 0: none; left out: "
        f"{left_out('training.gradient_clipping')}",
    )
    checkpoint_every: Count = Field(default=1, description="checkpoint every n-th block")
    block_checkpointing: dict[str, Checkpointing] = Field(
        default={}, description='blocks of another policy, by number: {"0-15" = "full", "16,18" = "none"}'
    )
    recompute_modules: tuple[RecomputeModule, ...] | None = Field(
        default=None,
        description=f'modules that "selective" runs again, by {phrase("training.recompute_modules")}; left '
        "out: the core of attention",
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        default=None,
        description='"full" by groups of layers, or for a stage\'s first layers; left out: layer by layer',
    )
    recompute_layers: Count | None = Field(
        default=None, description="layers of a group, or first layers of a stage; left out: 1"
    )
    checkpoint_stops_early: bool = Field(
        default=True, description="stop recomputing once backward has all it needs"
    )
    checkpoint_is_reentrant: bool = Field(
        default=False,
        description="`use_reentrant=True`, which holds a block's recomputed output during its backward",
    )
    checkpoint_offload: CheckpointOffload | None = Field(
        default=None,
        description="inputs of recomputed blocks in host memory: pageable (the host waits), pinned "
        "(save_on_cpu), or copied on a second stream; left out: on the GPU",
    )
    mlp_tiles: Count | Literal["auto"] | None = Field(
        default=None,
        description="tiles that MLPs split a rank's tokens into; auto: of hidden-size tokens; left out: 1",
    )
    optimizer_implementation: Literal["fused", "foreach", "for_loop"] = Field(
        default="fused", description=phrase("training.optimizer_implementation")
    )
    autocast: bool = Field(default=False, description=phrase("training.autocast"))
    stored_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description=f"what {phrase('training.stored_dtype')} keep weights, gradients and optimizer states in",
    )
    expandable_segments: bool = Field(
        default=False, description="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )
    max_split_size_mb: int | None = Field(
        default=None, gt=20, strict=True,
        description="PYTORCH_CUDA_ALLOC_CONF, in MiB: larger blocks are not split; left out: all are",
    )  # fmt: skip
    roundup_power2_divisions: int = Field(
        default=1, ge=1, strict=True,
        description="PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions, a power of two; 1: sizes are "
        "rounded to 512 bytes",
    )  # fmt: skip
    garbage_collection_threshold: float | None = Field(
        default=None, gt=0, lt=1, strict=True,
        description="PYTORCH_CUDA_ALLOC_CONF: without effect where the script sets no limit "
        "(set_per_process_memory_fraction), as is simulated; left out: none",
    )  # fmt: skip
    device_max_connections: int = Field(
        default=DEFAULT_CONNECTIONS, ge=1, le=MAX_CONNECTIONS, strict=True,
        description="CUDA_DEVICE_MAX_CONNECTIONS: hardware queues that streams share",
    )  # fmt: skip
