"""cuBLAS's workspaces in torch."""

from __future__ import annotations

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
