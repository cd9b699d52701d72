"""One file with all states, which rank 0 writes: `torch.save`, after a gather where states are sharded.

torch 2.13 distributed/checkpoint/state_dict.py with `full_state_dict=True, cpu_offload=True`: every DTensor
is all-gathered in turn, and rank 0 keeps it in host memory. A gathered tensor is the front of its padded
buffer, and torch.save writes buffers, so padding is saved. A tied weight, one buffer before, is then two.
"""

from __future__ import annotations

import numpy as np

from zsim.goodput.checkpoints.dcp import DcpLayout
from zsim.goodput.checkpoints.pickled import PickledFile
from zsim.goodput.checkpoints.saved import SavedFiles
from zsim.goodput.checkpoints.tensors import (
    STEP_BYTES,
    ModelStates,
    StateTensor,
    trainable_tensors,
    untied_tensors,
)

FILE = "checkpoint.pt"


def full_file(model_states: ModelStates, layout: DcpLayout) -> SavedFiles:
    """The file, of all pipeline and tensor-parallel ranks."""
    file, gathered = PickledFile(FILE, 0), []
    for stage in model_states.tensors:
        for tensor in stage if layout.shards > 1 else untied_tensors(stage):
            size = _padded_bytes(model_states, tensor, layout)
            file.add_parameter(size)
            gathered.append(size)
        for tensor in trainable_tensors(stage):
            size = _padded_bytes(model_states, tensor, layout)
            file.add_states([size] * model_states.num_states + [STEP_BYTES] * model_states.has_steps)
            gathered += [size] * model_states.num_states
    world = model_states.world_size
    is_sharded = layout.shards * model_states.tensor_ranks * model_states.expert_shards > 1
    staged, read = np.zeros((2, world), dtype=np.int64)
    staged[0] = read[0] = file.tensors
    return SavedFiles(
        "full",
        (file.build(),),
        staged,
        read,
        gathered=tuple(gathered) if is_sharded else (),
        read_once=True,
        states=model_states.num_parameters,
    )


def _padded_bytes(model_states: ModelStates, tensor: StateTensor, layout: DcpLayout) -> int:
    """Bytes of a gathered tensor. For expert-parallel experts, over the ranks that cut each model shard
    first.
    """
    rows, shards = layout.rows_of(tensor), layout.shards_of(tensor)
    padded = -(-rows // shards) * shards
    return tensor.numel // rows * padded * model_states.model_shards_of(tensor) * layout.dtype_bytes
