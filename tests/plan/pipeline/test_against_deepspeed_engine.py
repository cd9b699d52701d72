"""Against DeepSpeed's own PipelineEngine: the messages and collectives of a step, rank by rank, in order.

`traces/deepspeed/pipeline.json` was recorded on CPU ranks by `python -m validation.deepspeed_calls.pipeline`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zsim
from validation.deepspeed_calls.pipeline import CASES, LENGTH, MICRO_BATCHES, SHAPE, world_size
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, PointToPoint
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "traces" / "deepspeed" / "pipeline.json").read_text()
)["cases"]


def job_of(name: str) -> Job:
    stages, sharing, is_tied, keys = CASES[name]
    model = {
        "model_type": "llama", "hidden_size": SHAPE.hidden_size, "intermediate_size": SHAPE.intermediate_size,
        "num_hidden_layers": SHAPE.num_hidden_layers, "num_attention_heads": SHAPE.num_attention_heads,
        "num_key_value_heads": SHAPE.num_key_value_heads, "vocab_size": SHAPE.vocab_size,
        "tie_word_embeddings": is_tied,
    }  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0, **keys,
    }  # fmt: skip
    experiment = zsim.Experiment(
        model=model, cluster="dgx-a100-80gb", gpus=world_size(stages, sharing),
        parallelism={"pipeline": stages, "tensor": sharing},
        strategy={"kind": "deepspeed", "config": config}, training={"sequence_length": LENGTH},
    )  # fmt: skip
    return resolve(experiment)


def calls_of(job: Job, rank: int) -> list[list[Any]]:
    """[kind, bytes, dtype] of a rank's calls; of collectives also size and distance of the group."""
    plan, found = make_plan(job), []
    for op in plan.program_on(rank).ops:
        work = op.work
        if isinstance(work, PointToPoint):
            found.append([work.kind, work.bytes, work.dtype])
        elif isinstance(work, Collective) and plan.groups[work.group].size > 1:
            ranks = plan.groups[work.group].ranks_of(rank)
            found.append([work.kind, work.bytes, work.dtype, len(ranks), ranks[1] - ranks[0]])
    return found


def recorded_calls(rank: dict[str, Any]) -> list[list[Any]]:
    messages = ("send", "recv")
    return [call[:3] if call[0] in messages else call for call in rank["calls"] if call[3] > 1]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[1] == 1])
def test_every_rank_makes_the_calls_of_pipeline_engine(name: str) -> None:
    """All of them: tied weights, buckets, overflow, norm, gathered weights, the loss."""
    job = job_of(name)
    ranks = RECORDED[name]
    for rank, recorded in enumerate(ranks):
        assert calls_of(job, rank) == recorded_calls(recorded), rank
    layers = [rank["layers"] for rank in ranks[:: job.data_parallel_size]]
    assert job.parallelism.layers_per_stage == tuple(layers)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[1] > 1])
def test_tensor_parallel_ranks_cut_and_gather_as_pipeline_engine_does(name: str) -> None:
    """Messages with their shapes, and gathers of whole messages; the recorded layers are not cut."""
    job, message = job_of(name), LENGTH * SHAPE.hidden_size * 2

    def passed(calls: list[list[Any]]) -> list[list[Any]]:
        return [
            call for call in calls
            if call[0] in ("send", "recv") or (call[:2] == ["all_gather", message] and call[3:] == [2, 1])
        ]  # fmt: skip

    for rank, recorded in enumerate(RECORDED[name]):
        assert passed(calls_of(job, rank)) == passed(recorded_calls(recorded)), rank
