"""A sync from FSDP2's shards on fake ranks: what torch gathers, against what is simulated."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest

pytest.importorskip("torch", reason="needs torch: pip install zsim[validate]")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from tests.workflows.test_loop import resolved
from validation.collective_log import CollectiveLog
from validation.llama import Llama, find_shape
from validation.oracle.run import fake_world
from validation.oracle.sharding import make_mesh, shard_model
from zsim.cost.inference.layers import EngineLayout, served_model
from zsim.specs.library import Library
from zsim.workflows.rl.phases import model_bytes, num_tensors

RANKS = 8
NAME = "llama-3.2-1b"


def test_a_sync_gathers_every_parameter_once_in_the_engines_type() -> None:
    """verl's and NeMo-RL's `full_tensor` of each sharded parameter, cast before it."""
    with fake_world(RANKS):
        mesh = make_mesh(RANKS, 1)
        with FakeTensorMode():
            model = Llama(find_shape(NAME))
            shard_model(model, "torchtitan", True, mesh=mesh)
            with CollectiveLog() as log:
                for parameter in dict.fromkeys(model.parameters()):
                    cast(DTensor, parameter.to(torch.bfloat16)).full_tensor()
    job = resolved(reference="none")
    assert Counter(call.kind for call in log.calls) == {"all_gather": num_tensors(job.update_job.model)}
    assert sum(call.bytes for call in log.calls) == model_bytes(job)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_tensor_ranks_keep_their_columns_and_rows_of_the_gathered_weights(ranks: int) -> None:
    """Embedding, head and projections are cut, norms are not. A tied head is the embedding."""
    shape = find_shape(NAME)
    with FakeTensorMode():
        parameters = dict(Llama(shape).named_parameters())
    kept = sum(
        parameter.numel() // (1 if parameter.dim() == 1 else ranks) for parameter in parameters.values()
    )
    served = served_model(Library().model(NAME), EngineLayout(ranks)).weight_bytes
    assert served == pytest.approx(2 * kept, rel=1e-3)
