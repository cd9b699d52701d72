"""Costs of deterministic backwards of fused attention: FlashAttention-2's, a grid that just covers the SMs
and a dq for each of its columns, and cuDNN's on Hopper.

Otherwise one block of threads takes each block of keys, and blocks add into one fp32 dq in any order. In
deterministic mode n = ceil(S / (b a)) blocks share the keys of each of b a heads, S: SMs, and each adds into
a dq of its own. n zeroed buffers are summed up at the end (Dao-AILab/flash-attention 2.4.1 to 0251105a,
csrc/flash_attn/src/flash_bwd_launch_template.h `run_flash_bwd_seqk_parallel`, csrc/flash_attn/flash_api.cpp
`mha_bwd`). One such block fills an SM (8 warps and 104 to 144 kB of shared memory), so that n b a blocks a
little above S take two rounds, of which the second is nearly empty: 128 on the 108 SMs of an A100 for 32
heads. The buffers' memory is gone after each layer (`zsim.operations.attention`). That of packed documents
is taken for that of full sequences, and under context parallelism it is not counted.

cuDNN's on Hopper leaves dq to a second kernel: the gradient of all b a S_q S_k scores is a workspace of 2
bytes each, masked ones included (NVIDIA/cudnn-frontend pull request 398, July 2026; with cuDNN 9.25 it is
linear beyond 256 MB). What the mask leaves is taken to be written once and read once, the least possible:
nobody published what it takes. Its memory is not counted under context parallelism either.
"""

from __future__ import annotations

from math import ceil

from zsim.cost.kernels.kernel import Kernel
from zsim.operations.attention.kernels import num_buffers
from zsim.specs.cluster.gpu import Gpu

_KEYS = 128  # of a block, for heads up to 128 wide
_KEYS_OF_WIDE_HEADS = 64
_FP32 = 4


def slowdown(kernel: Kernel, gpu: Gpu) -> float:
    """How many times as long the products take as with all SMs busy throughout.

    A block of threads takes c = ceil(k / n) of the k blocks of keys. t = ceil(k / c) b a of them work, in
    ceil(t / S) rounds: ceil(t / S) c S / (k b a).
    """
    heads, _, keys, head_dim = kernel.shape
    blocks = ceil(keys / (_KEYS if head_dim <= _KEYS else _KEYS_OF_WIDE_HEADS))
    blocks_per_thread_block = ceil(blocks / num_buffers(heads, gpu.sm_count))
    rounds = ceil(ceil(blocks / blocks_per_thread_block) * heads / gpu.sm_count)
    return rounds * blocks_per_thread_block * gpu.sm_count / (blocks * heads)


def extra_seconds(kernel: Kernel, gpu: Gpu) -> float:
    """Seconds of zeroing and summing up the dq buffers beyond the first, before and after the products."""
    heads, queries, _, head_dim = kernel.shape
    return _moving_seconds(
        2 * _FP32 * (num_buffers(heads, gpu.sm_count) - 1) * heads * queries * head_dim, gpu
    )


def scores_seconds(bytes_of_scores: float, gpu: Gpu) -> float:
    """Seconds of writing the gradient of scores and of reading it again."""
    return _moving_seconds(2 * bytes_of_scores, gpu)


def _moving_seconds(num_bytes: float, gpu: Gpu) -> float:
    return num_bytes / (gpu.memory.bandwidth * gpu.memory_bound.elementwise_fraction)
