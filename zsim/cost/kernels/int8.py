"""The kernels of bitsandbytes' 8-bit products (LLM.int8), and what they keep and hold for a while.

Read in bitsandbytes 0.50.2: autograd/_functions.py `MatMul8bitLt`, backends/cuda/ops.py
`int8_vectorwise_quant`, `int8_linear_matmul`, `int8_mm_dequant`, with the threshold of outliers that
transformers gives (6.0, utils/quantization_config.py `llm_int8_threshold`).

- forward: the input is cast to fp16 and compared with the threshold (the host reads whether there are
  outliers), its rows are quantised, the product is int32, which a kernel scales to fp16, and another casts.
- backward: the weight is cast and scaled, two kernels, and multiplied in 16 bits.
- The input is kept, although the weight has no gradient. A row of the weight has an fp32 scale.

The columns with outliers, a few of thousands, are picked out of input and weight, multiplied in 16 bits,
and added in a pass over the output (backends/default/ops.py `int8_mixed_scaled_mm`). Models of 6.7 billion
parameters have some in every layer: Dettmers et al. 2022 (arXiv 2208.07339), section 3.2. The work of so few
columns is left out, that of the pass is not.
"""

from __future__ import annotations

from zsim.cost.kernels.kernel import Kernel, elementwise

TYPE = "int8"
_FP16, _FP32, _INT32 = 2, 4, 4
_OUTLIER_LAUNCHES = 8  # where they are (nonzero, three), two gathers, a scaling, a cast, the product's sum


def forward_kernels(m: int, n: int, k: int, dtype: str) -> tuple[Kernel, ...]:
    """The kernels of m x k by k x n, whose input and output are of `dtype`."""
    cast = 2 * _FP16 if dtype != "fp16" else 0
    rows = float(m * k)
    outliers = elementwise((2 * _FP16 + _FP16 + 1 + 1 + 1) * rows, "fp16", 4)
    product = Kernel("gemm", 2.0 * m * n * k, rows + n * k + _INT32 * m * n, TYPE, (m, n, k))
    scaled = elementwise((_INT32 + _FP16) * float(m * n), "fp32")
    before = (elementwise(cast * rows, "fp16"),) if cast else ()
    after = (elementwise(cast * float(m * n), "fp16"),) if cast else ()
    added = elementwise(2 * _FP16 * float(m * n), "fp16", _OUTLIER_LAUNCHES)
    return (*before, outliers, elementwise((_FP16 + 1) * rows, "fp16"), product, scaled, *after, added)


def weight_kernels(n: int, k: int, element_bytes: int) -> tuple[Kernel, ...]:
    """The kernels that make the weight of backward, of n x k elements of `element_bytes`."""
    return (elementwise((1 + element_bytes + 2 * element_bytes) * float(n * k), "fp32", 2),)


def temporary_bytes(m: int, n: int, k: int) -> int:
    """Bytes besides input and output while forward runs: the input in fp16 and quantised, the product in
    int32 and fp16.
    """
    return m * (k * (_FP16 + 1) + n * (_INT32 + _FP16))


def scale_bytes(rows: int) -> int:
    """Bytes of a weight's scales."""
    return _FP32 * rows
