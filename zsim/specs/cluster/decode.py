"""Rates of a GPU's kernels in inference, where few tokens read all weights and their whole cache."""

# See [Note: annotations of tables].

from pydantic import Field

from zsim.specs.cluster.table import Fraction, Table
from zsim.specs.lazy_model import FiniteTable
from zsim.units import BytesPerSecond, Seconds


class StreamingKernel(FiniteTable):
    """A kernel that reads memory once. It takes `seconds + bytes / (fraction x bandwidth)`."""

    seconds: Seconds = Field(ge=0, description="time of the kernel whatever it reads, in a CUDA graph")
    fraction: Fraction = Field(description="of the memory's bandwidth, reached by large reads")

    def seconds_for(self, num_bytes: float, bandwidth: float) -> float:
        """Seconds to read `num_bytes` at a `bandwidth` in bytes/s."""
        return self.seconds + num_bytes / (self.fraction * bandwidth)


class TypeFractions(FiniteTable):
    """Fractions of the peak by the type of weights. Types that the GPU lacks have none."""

    bf16: Fraction = Field(description="of 16-bit weights")
    fp8: Fraction | None = Field(default=None, description="of fp8 weights; left out: the GPU lacks them")
    fp4: Fraction | None = Field(default=None, description="of fp4 weights; left out: the GPU lacks them")

    def of(self, dtype: str) -> float:
        """The fraction of a type, or of the next wider one with a fraction."""
        candidates = {"fp4": (self.fp4, self.fp8), "fp8": (self.fp8,)}.get(dtype, ())
        return next((fraction for fraction in candidates if fraction is not None), self.bf16)


class SmallAllReduce(FiniteTable):
    """An all-reduce inside a node by kernels that read one another's memory, as engines of inference have.

    It takes `seconds + 2 (n - 1) / n x bytes / bandwidth` on n ranks.
    """

    seconds: Seconds = Field(ge=0, description="time of an all-reduce of a few bytes")
    bandwidth: BytesPerSecond = Field(gt=0, description="bus bandwidth of messages around a megabyte")

    def seconds_of(self, num_bytes: float, ranks: int) -> float:
        """Seconds of an all-reduce of `num_bytes` bytes."""
        return self.seconds + 2 * (ranks - 1) / ranks * num_bytes / self.bandwidth


class DecodeRates(Table):
    """`[decode]` of a GPU's file."""

    product: StreamingKernel = Field(description="products of 16-bit weights with at most 64 rows")
    quantized_product: StreamingKernel = Field(
        description="products of fp8 or fp4 weights, the cast of their rows included"
    )
    attention: StreamingKernel = Field(description="attention of one token a sequence, grouped heads")
    latent_attention: StreamingKernel = Field(description="the same over a latent cache, all heads at once")
    experts: StreamingKernel = Field(description="both grouped products of a layer's experts")
    all_reduce: SmallAllReduce = Field(description="an all-reduce of activations on one node")
    arithmetic: TypeFractions = Field(description="of the peak, reached by products of thousands of rows")
    expert_arithmetic: TypeFractions = Field(
        description="the same of grouped products, of a thousand rows an expert"
    )
