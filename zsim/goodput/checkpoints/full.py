"""One file with all states, which rank 0 writes: `torch.save`, after a gather where states are sharded.

torch 2.13 distributed/checkpoint/state_dict.py with `full_state_dict=True, cpu_offload=True`: every DTensor
is all-gathered in turn, and rank 0 keeps it in host memory. A gathered tensor is the front of its padded
buffer, and torch.save writes buffers, so padding is saved. A tied weight, one buffer before, is then two.
"""

from __future__ import annotations

import numpy as np

from zsim.goodput.checkpoints.dcp import DcpLayout
from zsim.goodput.checkpoints.pickled import PickledFile
from zsim.goodput.checkpoints.saved import Saved
from zsim.goodput.checkpoints.tensors import STEP_BYTES, HeldStates, HeldTensor, own, trained

FILE = "checkpoint.pt"


def full_file(held: HeldStates, layout: DcpLayout) -> Saved:
    """The file, of all pipeline and tensor-parallel ranks."""
    file, gathered = PickledFile(FILE, 0), []
    for stage in held.tensors:
        for tensor in stage if layout.shards > 1 else own(stage):
            size = _padded_bytes(held, tensor, layout)
            file.add_parameter(size)
            gathered.append(size)
        for tensor in trained(stage):
            size = _padded_bytes(held, tensor, layout)
            file.add_states([size] * held.num_states + [STEP_BYTES] * held.has_steps)
            gathered += [size] * held.num_states
    world = held.world_size
    is_cut = layout.shards * held.tensor_ranks * held.expert_places > 1
    staged, read = np.zeros((2, world), dtype=np.int64)
    staged[0] = read[0] = file.tensors
    return Saved(
        "full",
        (file.saved(),),
        staged,
        read,
        gathered=tuple(gathered) if is_cut else (),
        read_once=True,
        states=held.num_parameters,
    )


def _padded_bytes(held: HeldStates, tensor: HeldTensor, layout: DcpLayout) -> int:
    """Bytes of a gathered tensor. For expert-parallel experts, over the ranks that cut each model shard
    first.
    """
    rows, shards = layout.rows_of(tensor), layout.shards_of(tensor)
    padded = -(-rows // shards) * shards
    return tensor.numel // rows * padded * held.places_of(tensor) * layout.dtype_bytes
