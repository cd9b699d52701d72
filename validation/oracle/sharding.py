"""The calls of `fully_shard` on a Llama in three code bases.

- `torchtitan-0.1`: each block, then the root with everything else (embedding, norm, head). Neither the last
block nor the root is resharded after forward, since backward begins with them. - `torchtitan` (0.2 and later;
also Accelerate 1.15): the embedding, each block, and norm + head together, which are not resharded. Tied
weights put embedding, norm and head in one group. - `huggingface` (Accelerate before it had units for
embedding and head): each block is resharded, including the last one; the root with everything else is not.

Sources: torchtitan v0.1 `parallelize_llama.py`, torchtitan 0.3.0 `distributed/fsdp.py`, accelerate 1.15.0
`utils/fsdp_utils.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from validation.llama import Llama
from validation.oracle.case import Case, Reshard, Wrapping

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make_mesh(world_size: int, replicate: int, device: str = "cpu") -> DeviceMesh:
    """A mesh of one dimension, or (replicate, shard) for HSDP. Not inside a FakeTensorMode: ranks must be
    real numbers."""
    if replicate > 1:
        return init_device_mesh(
            device, (replicate, world_size // replicate), mesh_dim_names=("replicate", "shard")
        )
    return init_device_mesh(device, (world_size,), mesh_dim_names=("shard",))


def shard_case(model: Llama, mesh: DeviceMesh, case: Case) -> None:
    """Apply `fully_shard` as the case says."""
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[case.param_dtype],
        reduce_dtype=DTYPES[case.reduce_dtype],
        cast_forward_inputs=False,
    )
    shard_model(model, case.wrapping, case.reshard_after_forward, mesh=mesh, mp_policy=policy)


def shard_model(model: Llama, wrapping: Wrapping, reshard: Reshard, **options: Any) -> None:
    """Apply `fully_shard` with the wrapping; `reshard` is the blocks' `reshard_after_forward`, `options` go
    to every call."""
    decoder, blocks = model.model, list(model.model.layers)
    keeps_last = wrapping == "torchtitan-0.1"
    if wrapping == "none":
        fully_shard(model, reshard_after_forward=False, **options)
        return
    if wrapping in ("torchtitan", "blocks:4"):
        per_unit = 4 if wrapping == "blocks:4" else 1
        ends = [decoder.norm, model.lm_head]
        if model.shape.tie_word_embeddings:
            ends.insert(0, decoder.embed_tokens)
        else:
            fully_shard(decoder.embed_tokens, reshard_after_forward=reshard, **options)
        for first in range(0, len(blocks), per_unit):
            unit = blocks[first : first + per_unit]
            fully_shard(unit if per_unit > 1 else unit[0], reshard_after_forward=reshard, **options)
        fully_shard(ends, reshard_after_forward=False, **options)
        fully_shard(model, **options)
        return
    for block in blocks:
        is_kept = keeps_last and block is blocks[-1]
        fully_shard(block, reshard_after_forward=False if is_kept else reshard, **options)
    fully_shard(model, reshard_after_forward=False, **options)
