"""Seconds of one iteration of an inference engine.

An iteration runs one token of every sequence that decodes, and chunks of prompts beside them. All kernels
are streams over weights or caches until their rows fill the GPU's arithmetic units:

    t = host (+) sum over kernels of max(t0 + Q / (B g), W / (P f))

Q: bytes of weights, or of the caches of all sequences. t0, g: fixed time and fraction of the bandwidth B, of
the GPU's file (`[decode]`). W, P, f: FLOPs, peak, and the fraction by shape of `zsim.cost.rates.efficiency`.
(+): the host's time is added, or hidden behind the GPU where the engine schedules ahead.

[Note: touched experts] An expert's weights are read if any row chose it. Of E experts that n tokens choose k
of, all alike likely, E (1 - (1 - k/E)^n) are touched.

[Note: pages] A cache is read in tiles of 128 tokens. Below that a sequence costs what 128 tokens cost
(generation attention of AIConfigurator's tables, 095f58a5: 27 ns a head and sequence on H100 whatever the
context).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from zsim.cost.inference.layers import CachedAttention, ExpertsLayer, ServedModel, WeightProduct
from zsim.cost.kernels.kernel import Kernel
from zsim.cost.rates.gpu import arithmetic_seconds, kernel_seconds
from zsim.dtypes import DTYPE_BYTES
from zsim.specs.cluster.decode import DecodeRates, SmallAllReduce, StreamingKernel
from zsim.specs.cluster.gpu import Gpu

TILE = 128  # tokens of a cache that a block of threads reads at once
GRAPH_SIZES = (1, 2, 4)  # and multiples of 8, from 256 on of 16, see `padded_batch`
_LAST_SMALL_GRAPH = 256


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
        return self.seconds + self.seconds_per_sequence * sequences


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens of a sequence that are computed in one iteration, and those before them in the cache."""

    new_tokens: int
    cached_tokens: int = 0


def padded_batch(sequences: int, max_graph: int) -> int:
    """Rows that a CUDA graph computes for `sequences` sequences: the next size that was captured (vLLM 0.24
    `config/compilation.py`: 1, 2, 4, every 8 up to 256, then every 16). Above `max_graph` there is none.
    """
    if sequences > max_graph:
        return sequences
    for size in GRAPH_SIZES:
        if sequences <= size:
            return size
    step = 8 if sequences <= _LAST_SMALL_GRAPH else 16
    return -(-sequences // step) * step


class IterationPricer:
    """Seconds of an engine's iterations with one model on one type of GPU."""

    def __init__(
        self,
        model: ServedModel,
        gpu: Gpu,
        host: HostRates,
        *,
        max_graph: int = 512,
        uses_graphs: bool = True,
        launch_seconds: float = 0.0,
        all_reduce: SmallAllReduce | None = None,
    ) -> None:
        self.model, self.gpu, self.host = model, gpu, host
        self.max_graph = max_graph if uses_graphs else 0
        self.launch_seconds = launch_seconds
        self.rates = decode_rates(gpu)
        self.all_reduce = all_reduce or self.rates.all_reduce
        self._dense = cache(self._dense_seconds)

    def seconds(self, sequences: int, context_tokens: float, chunks: Sequence[PromptChunk] = ()) -> float:
        """Seconds of an iteration in which `sequences` decode, with `context_tokens` in all their caches."""
        new_tokens = sum(chunk.new_tokens for chunk in chunks)
        is_pure = not chunks
        rows = padded_batch(sequences, self.max_graph) if is_pure else sequences + new_tokens
        gpu_seconds = self._dense(rows, sequences + len(chunks))
        gpu_seconds += self._decode_attention(sequences, context_tokens)
        gpu_seconds += sum(self._prompt_attention(chunk) for chunk in chunks)
        launching = 0.0
        if not is_pure or sequences > self.max_graph:
            launching = self.num_kernels * self.launch_seconds
        host = self.host.seconds_for(sequences + len(chunks))
        busy = max(gpu_seconds, launching)
        return max(busy, host) if self.host.is_overlapped else busy + host

    def context_seconds(self) -> float:
        """Seconds that one more token in the caches adds to an iteration that decodes."""
        return sum(
            count * attention.cache_elements * self._cache_size / (self.gpu.memory.bandwidth * rate.fraction)
            for attention, count in self.model.attentions.items()
            for rate in [self._attention_rate(attention)]
            if attention.window is None
        )

    @cached_property
    def num_kernels(self) -> int:
        """Kernels of one pass."""
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

    @property
    def _cache_size(self) -> int:
        return DTYPE_BYTES[self.model.layout.cache_dtype]

    def _dense_seconds(self, rows: int, sampled: int) -> float:
        """Seconds of all that does not depend on contexts, for `rows` tokens of which `sampled` go through
        the head.
        """
        model = self.model
        seconds = sum(count * self._product(product, rows) for product, count in model.products.items())
        seconds += sum(count * self._experts(layer, rows) for layer, count in model.experts.items())
        seconds += self._product(model.head, sampled)
        hidden_bytes = rows * model.hidden_size * 2
        small = self.rates.product.seconds + 4 * hidden_bytes / self.gpu.memory.bandwidth
        seconds += model.small_kernels * small
        logits_bytes = sampled * model.head.out_features * 4
        seconds += 4 * logits_bytes / self.gpu.memory.bandwidth  # softmax in fp32, and the choice
        if model.layout.tensor > 1:
            seconds += 2 * model.num_layers * self._all_reduce_seconds(hidden_bytes)
        return seconds

    def _all_reduce_seconds(self, num_bytes: float) -> float:
        ranks = self.model.layout.tensor
        return self.all_reduce.seconds + 2 * (ranks - 1) / ranks * num_bytes / self.all_reduce.bandwidth

    def _product(self, product: WeightProduct, rows: int) -> float:
        k, n = product.in_features, product.out_features
        dtype = self.model.layout.weight_dtype
        size = DTYPE_BYTES[dtype]
        rate = self.rates.product if size > 1 else self.rates.quantized_product
        num_bytes = n * k * size + rows * (n + k) * 2
        streaming = rate.seconds_for(num_bytes, self.gpu.memory.bandwidth)
        kernel = Kernel("gemm", 2.0 * rows * n * k, num_bytes, _arithmetic_dtype(dtype), (rows, n, k))
        return max(streaming, rate.seconds + arithmetic_seconds(kernel, self.gpu))

    def _experts(self, layer: ExpertsLayer, rows: int) -> float:
        """See [Note: touched experts]. Each rank has the rows of all tokens for its own experts."""
        dtype = self.model.layout.weight_dtype
        num_bytes = layer.touched_experts(rows) * layer.numel * DTYPE_BYTES[dtype]
        streaming = self.rates.experts.seconds_for(num_bytes, self.gpu.memory.bandwidth)
        expert_rows = max(1, round(rows * layer.top_k / layer.num_experts))
        shape = expert_rows, layer.expert_features, layer.in_features
        flops = 2.0 * expert_rows * layer.numel * layer.local_experts
        kernel = Kernel("gemm", flops, num_bytes, _arithmetic_dtype(dtype), shape, is_grouped=True)
        return max(streaming, self.rates.experts.seconds + arithmetic_seconds(kernel, self.gpu))

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


def _arithmetic_dtype(dtype: str) -> str:
    return dtype if dtype in ("fp8", "fp4") else "bf16" if dtype == "bf16" else dtype


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
    )
