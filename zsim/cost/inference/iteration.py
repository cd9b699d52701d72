"""Seconds of one iteration of an inference engine.

An iteration runs one token of every sequence that decodes, and chunks of prompts beside them. All kernels
are streams over weights or caches until their rows fill the GPU's arithmetic units:

    t = host (+) sum over kernels of t0 + sqrt((Q / (B g))^2 + (W / (P f))^2)

Q: bytes of weights, or of the caches of all sequences. t0, g: fixed time and fraction of the bandwidth B. W,
P, f: FLOPs, peak, and the fraction of it that many rows reach. t0, g and f are of the GPU's file
(`[decode]`). The root is what kernels between the two bounds need (AIConfigurator's tables of products with
64 to 8,192 rows, 095f58a5). Attention of prompts is that of `zsim.cost.rates.gpu`. (+): the host's time is
added, or hidden behind the GPU where the engine schedules ahead.

[Note: touched experts] An expert's weights are read if any row chose it. Of E experts that n tokens choose k
of, all alike likely, E (1 - (1 - k/E)^n) are touched.

[Note: quantized checkpoints] The head stays in 16 bits, as quantized checkpoints have it (NVIDIA's ModelOpt
excludes `lm_head`, so does `modules_to_not_convert` of openai/gpt-oss-20b, which keeps attention and router
too). Experts of types that the GPU does not compute in are made 16 bits inside the
kernel, see `UNPACKED_EXPERTS`.

[Note: pages] A cache is read in tiles of 128 tokens. Below that a sequence costs what 128 tokens cost
(generation attention of AIConfigurator's tables, 095f58a5: 27 ns a head and sequence on H100 whatever the
context).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import hypot

from zsim.cost.inference.layers import (
    WEIGHT_BYTES,
    CachedAttention,
    ExpertsLayer,
    ServedModel,
    WeightProduct,
)
from zsim.cost.kernels.kernel import Kernel
from zsim.cost.rates.gpu import kernel_seconds, peak_flops_per_second
from zsim.dtypes import DTYPE_BYTES
from zsim.specs.cluster.gpu import DecodeRates, Gpu, SmallAllReduce, StreamingKernel, TypeFractions

TILE = 128  # tokens of a cache that a block of threads reads at once
EXPERT_WIDTH_HALF = 450
"""Width of an expert on a rank at which its products reach half of what wide ones do. On H100 the fraction of
the peak is 0.61, 0.37, 0.33 and 0.24 of experts 7,168, 768, 384 and 192 wide with 512 rows each
(AIConfigurator's tables)."""
EAGER_KERNEL_SECONDS = 28e-6
"""Python of one kernel of an engine without CUDA graphs, that of transformers' modules on H100: a
launch of 6 us, and 22 us beside it (`eager_call` of zsim's frameworks.toml)."""
ADAPTER_SECONDS = 0.39e-3
"""The same of the adapters of one product: the geometric mean of six rollouts, 0.32 to 0.56 ms (verl's LoRA
logs, eric-haibin-lin/verl-data, 7 to 72 billion), as `python -m validation.rl.calibration` prints it."""
_HEAD_DTYPE = "bf16"  # see [Note: quantized checkpoints]
ADAPTER_KERNELS = 3  # of a product's adapters: down, up, and the sum
GRAPH_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Rows of captured CUDA graphs, vLLM's default (0.24 `config/compilation.py`)."""
FP8_BLOCK, SINGLE_BLOCK_EXPERTS = 128, 1.29
"""Features that share a scale of fp8, and how much longer experts take that are cut to one such block: 4 to
256 rows on DeepSeek-V3's over 16 tensor ranks, by vLLM's and SGLang's kernels on H100, H200 and B200
(AIConfigurator's tables, 095f58a5, `fp8_block`, 1.10 to 1.43, and 0.95 to 1.12 of two blocks). Experts in fp8
are assumed to have scales of blocks, as DeepSeek's and Qwen's checkpoints do: scales of tensors or channels
are not told apart."""
UNPACKED_EXPERTS = 0.68
"""Part of the FLOP/s of experts in bf16 that remains where their weights are of 4 bits in memory: 1,024 to
8,192 rows on experts 2,880 wide by TensorRT-LLM's and vLLM's Triton kernels on H100 and H200
(AIConfigurator's tables, `w4a16_mxfp4`, 0.5 to 1.0)."""


@dataclass(frozen=True, slots=True)
class HostRates:
    """The Python of an engine's iteration: scheduling, sampling, and the texts of tokens."""

    seconds: float
    """Seconds of an iteration."""
    seconds_per_sequence: float
    """Seconds more for each running sequence."""
    is_overlapped: bool
    """The next iteration is scheduled while the GPU runs this one."""

    def seconds_for(self, sequences: int) -> float:
        """Seconds of an iteration."""
        return self.seconds + self.seconds_per_sequence * sequences


@dataclass(frozen=True, slots=True)
class Speculation:
    """Tokens that a draft proposes for every sequence, of which the model accepts a part."""

    draft_tokens: int = 0
    acceptance: float = 0.0
    """Part of the proposed tokens that is accepted."""

    @property
    def tokens_per_iteration(self) -> float:
        """Mean tokens that a sequence gets: the accepted ones, and the model's own."""
        return 1.0 + self.acceptance * self.draft_tokens


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens of a sequence that are computed in one iteration, and those before them in the cache."""

    new_tokens: int
    cached_tokens: int = 0


def padded_batch(sequences: int, max_graph: int, sizes: Sequence[int] = GRAPH_SIZES) -> int:
    """Rows that a CUDA graph computes for `sequences` sequences: the next of the captured `sizes`, at most
    `max_graph`, above which there is none.
    """
    if sequences > max_graph:
        return sequences
    index = bisect_left(sizes, sequences)
    return min(sizes[index], max_graph) if index < len(sizes) else max_graph


class IterationPricer:
    """Seconds of an engine's iterations with one model on one type of GPU."""

    def __init__(
        self,
        model: ServedModel,
        gpu: Gpu,
        host: HostRates,
        *,
        max_graph: int = 512,
        graph_sizes: Sequence[int] = GRAPH_SIZES,
        uses_graphs: bool = True,
        launch_seconds: float = 0.0,
        has_adapters: bool = False,
        speculation: Speculation | None = None,
        all_reduce_seconds: Callable[[float, int], float] | None = None,
    ) -> None:
        self.model, self.gpu, self.host = model, gpu, host
        self.max_graph = max_graph if uses_graphs else 0
        self.graph_sizes = graph_sizes
        self.launch_seconds = launch_seconds
        self.has_adapters = has_adapters
        self.speculation = speculation or Speculation()
        self.rates = decode_rates(gpu)
        self.all_reduce_seconds = all_reduce_seconds or self.rates.all_reduce.seconds_of
        self._dense = cache(self._dense_seconds)

    def seconds(self, sequences: int, context_tokens: float, chunks: Sequence[PromptChunk] = ()) -> float:
        """Seconds of an iteration in which `sequences` decode, with `context_tokens` in all their caches.

        Groups of ranks with sequences of their own have equal parts of them. With speculation it is the time
        of a token of every sequence: that of an iteration over the mean number of its tokens, unless there
        are chunks of prompts.
        """
        groups = self.model.layout.data
        local = -(-sequences // groups)
        new_tokens = -(-sum(chunk.new_tokens for chunk in chunks) // groups)
        sampled = local + -(-len(chunks) // groups)
        is_pure = not chunks
        drafts = self.speculation.draft_tokens
        verified = local * (1 + drafts)
        rows = self._padded(verified) if is_pure else verified + new_tokens
        gpu_seconds = self._dense(rows, sampled + local * drafts)
        if drafts:
            gpu_seconds += drafts * self._draft_seconds(local)
        gpu_seconds += self._decode_attention(local, context_tokens / groups)
        gpu_seconds += sum(self._prompt_attention(chunk) for chunk in chunks) / groups
        launching = 0.0
        if not is_pure or verified > self.max_graph:
            launching = self.num_kernels * self.launch_seconds
            if self.has_adapters and not self.max_graph:
                launching += ADAPTER_SECONDS * sum(self.model.products.values())
        host = self.host.seconds_for(sampled)
        busy = max(gpu_seconds, launching)
        seconds = max(busy, host) if self.host.is_overlapped else busy + host
        return seconds / self.speculation.tokens_per_iteration if is_pure else seconds

    def _draft_seconds(self, sequences: int) -> float:
        """Seconds of a proposal by one more layer with the model's head, as multi-token prediction has it."""
        head = self._product(self.model.head, sequences, _HEAD_DTYPE)
        layers = self._dense(self._padded(sequences), sequences) - head
        return layers / max(1, self.model.num_layers) + head

    def _padded(self, sequences: int) -> int:
        return padded_batch(sequences, self.max_graph, self.graph_sizes)

    @cached_property
    def num_kernels(self) -> int:
        """Kernels of one pass, without those of adapters."""
        model = self.model
        all_reduces = 2 * model.num_layers if model.layout.tensor > 1 else 0
        return (
            sum(model.products.values())
            + 2 * sum(model.experts.values())
            + sum(model.attentions.values())
            + model.small_kernels
            + all_reduces
            + 1
        )

    def _arithmetic_dtype(self, dtype: str) -> str:
        """The type of products: the weights', or bf16 where the GPU does not compute in that."""
        return dtype if getattr(self.gpu.peak, dtype, None) else "bf16"

    @property
    def _cache_size(self) -> int:
        return DTYPE_BYTES[self.model.layout.cache_dtype]

    def _dense_seconds(self, rows: int, sampled: int) -> float:
        """Seconds of all that does not depend on contexts, for `rows` tokens of which `sampled` go through
        the head.
        """
        model = self.model
        dtype = model.layout.product_dtype
        seconds = sum(
            count * self._product(product, rows, dtype) for product, count in model.products.items()
        )
        if self.has_adapters:
            seconds += ADAPTER_KERNELS * sum(model.products.values()) * self.rates.product.seconds
        expert_rows = rows * model.layout.data
        seconds += sum(count * self._experts(layer, expert_rows) for layer, count in model.experts.items())
        if model.layout.data > 1:
            exchanged_bytes = expert_rows * model.hidden_size * 2
            seconds += sum(model.experts.values()) * self._exchange_seconds(exchanged_bytes)
        seconds += self._product(model.head, sampled, _HEAD_DTYPE)
        hidden_bytes = rows * model.hidden_size * 2
        small = self.rates.product.seconds + 1.5 * hidden_bytes / self.gpu.memory.bandwidth
        seconds += model.small_kernels * small
        logits_bytes = sampled * model.head.out_features * 4
        seconds += 4 * logits_bytes / self.gpu.memory.bandwidth  # softmax in fp32, and the choice
        if model.layout.tensor > 1:
            seconds += 2 * model.num_layers * self.all_reduce_seconds(hidden_bytes, model.layout.tensor)
        return seconds

    def _exchange_seconds(self, num_bytes: float) -> float:
        """Seconds in which the rows of all groups come to the experts' ranks, and back: an all-gather and a
        reduce-scatter, as an engine has them that knows of no faster way. Each moves as many bytes as an
        all-reduce of half the size.
        """
        return 2 * self.all_reduce_seconds(num_bytes / 2, self.model.layout.data)

    def _product(self, product: WeightProduct, rows: int, dtype: str) -> float:
        k, n = product.in_features, product.out_features
        size = WEIGHT_BYTES[dtype]
        rate = self.rates.product if size > 1 else self.rates.quantized_product
        num_bytes = n * k * size + rows * (n + k) * 2
        reading = num_bytes / (rate.fraction * self.gpu.memory.bandwidth)
        flops_per_second = self._flops_per_second(self.rates.arithmetic, dtype)
        return rate.seconds + hypot(reading, 2.0 * rows * n * k / flops_per_second)

    def _experts(self, layer: ExpertsLayer, rows: int) -> float:
        """See [Note: touched experts]. Each rank has the rows of all tokens for its own experts."""
        dtype = self.model.layout.weight_dtype
        size = WEIGHT_BYTES[dtype]
        num_bytes = layer.touched_experts(rows) * layer.numel * size
        local_rows = rows * layer.top_k * layer.local_experts / layer.num_experts
        width = layer.expert_features / (layer.expert_features + EXPERT_WIDTH_HALF)
        rate = self.rates.experts
        reading = num_bytes / (rate.fraction * self.gpu.memory.bandwidth)
        flops_per_second = width * self._flops_per_second(self.rates.expert_arithmetic, dtype)
        if size < 1 and self._arithmetic_dtype(dtype) != dtype:
            flops_per_second *= UNPACKED_EXPERTS
        seconds = rate.seconds + hypot(reading, 2.0 * local_rows * layer.numel / flops_per_second)
        is_single = dtype == "fp8" and layer.expert_features <= FP8_BLOCK
        return SINGLE_BLOCK_EXPERTS * seconds if is_single else seconds

    def _flops_per_second(self, fractions: TypeFractions, weight_dtype: str) -> float:
        dtype = self._arithmetic_dtype(weight_dtype)
        return peak_flops_per_second(self.gpu, dtype) * fractions.of(dtype)

    def _attention_rate(self, attention: CachedAttention) -> StreamingKernel:
        return self.rates.latent_attention if attention.is_latent else self.rates.attention

    def _decode_attention(self, sequences: int, context_tokens: float) -> float:
        if not sequences:
            return 0.0
        seconds = 0.0
        mean = context_tokens / sequences
        for attention, count in self.model.attentions.items():
            seen = max(min(mean, attention.window or mean), TILE)
            num_bytes = sequences * seen * attention.cache_elements * self._cache_size
            rate = self._attention_rate(attention)
            seconds += count * rate.seconds_for(num_bytes, self.gpu.memory.bandwidth)
        return seconds

    def _prompt_attention(self, chunk: PromptChunk) -> float:
        return sum(
            count * kernel_seconds(_prompt_kernel(attention, chunk), self.gpu)
            for attention, count in self.model.attentions.items()
        )


def _prompt_kernel(attention: CachedAttention, chunk: PromptChunk) -> Kernel:
    """Fused attention of a chunk over itself and the tokens before it, causal."""
    queries, keys = chunk.new_tokens, chunk.new_tokens + chunk.cached_tokens
    window = attention.window or 0
    pairs = queries * (min(window, keys) if window else keys - queries / 2)
    flops = 4.0 * attention.num_heads * attention.head_dim * pairs
    num_bytes = float((keys * attention.cache_elements + 2 * queries * attention.num_heads) * 2)
    shape = attention.num_heads, queries, keys, min(attention.head_dim, 256)
    return Kernel("attention_forward", flops, num_bytes, "bf16", shape, window=window)


_ASSUMED_SOURCE = (
    "assumed: of the GPUs that were timed (AIConfigurator 095f58a5), kernels of an engine take 2 to 3 us and "
    "reach 0.7 to 0.95 of the bandwidth"
)


def decode_rates(gpu: Gpu) -> DecodeRates:
    """`[decode]` of the GPU's file, or what is assumed where it has none."""
    if gpu.decode is not None:
        return gpu.decode
    fraction = min(0.95, gpu.memory_bound.elementwise_fraction)

    def streaming(seconds: float, share: float = 1.0) -> StreamingKernel:
        return StreamingKernel.model_construct(seconds=seconds, fraction=share * fraction)

    return DecodeRates.model_construct(
        source=_ASSUMED_SOURCE,
        evidence="assumed",
        product=streaming(2.5e-6),
        quantized_product=streaming(5.5e-6, 0.9),
        attention=streaming(10e-6),
        latent_attention=streaming(14e-6),
        experts=streaming(25e-6),
        all_reduce=SmallAllReduce.model_construct(seconds=8e-6, bandwidth=100e9),
        arithmetic=TypeFractions.model_construct(bf16=0.8, fp8=0.55, fp4=0.38),
        expert_arithmetic=TypeFractions.model_construct(bf16=0.6, fp8=0.4, fp4=0.3),
    )
