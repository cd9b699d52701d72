"""One rank stands for all: folded and unfolded give the same step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zsim.engine.simulate import Outcome, simulate_job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp2": {"kind": "fsdp2"},
    "fsdp2, resharded to half a node": {"kind": "fsdp2", "reshard_after_forward": 4},
    "hsdp": {"kind": "fsdp2", "replicate": 2},
    "hsdp across half nodes": {"kind": "fsdp2", "replicate": 4},
    "fsdp1": {"kind": "fsdp1"},
    "fsdp1, hybrid": {"kind": "fsdp1", "sharding_strategy": "HYBRID_SHARD", "replicate": 2},
    "fsdp1, wrapped by size": {"kind": "fsdp1", "wrapping": "size:5000000"},
    "ddp": {"kind": "ddp", "bucket_cap_mb": 100},
    "megatron": {"kind": "megatron", "distributed_optimizer": True, "overlap_grad_reduce": True},
}
TOLERANCE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}


def simulate(strategy: dict[str, Any], nodes: int, cluster: str, *, unfold: bool) -> Outcome:
    experiment = Experiment(
        model="gpt2",
        cluster=cluster,
        nodes=nodes,
        training={"sequence_length": 512, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0},
        strategy=strategy,
    )
    return simulate_job(resolve(experiment), unfold=unfold)


@pytest.mark.parametrize(
    ("name", "nodes", "cluster"),
    [
        *((name, 2, "dgx-h100") for name in STRATEGIES),
        ("fsdp2", 3, "dgx-h100"),
        ("hsdp", 4, "dgx-h100"),
        ("fsdp1, hybrid", 4, "dgx-a100-80gb"),
        ("ddp", 3, "dgx-a100-80gb"),
        ("fsdp2", 2, "rtx-4090-x8"),
        ("hsdp", 2, "rtx-4090-x8"),
        ("fsdp1, hybrid", 2, "dgx-2"),
        ("ddp", 2, "cpu-gloo"),
    ],
)
def test_folded_equals_unfolded(name: str, nodes: int, cluster: str) -> None:
    """Step time, every span of every rank, traffic: to 1e-9. (Switched NVLink, PCIe, a CPU box with gloo.)"""
    strategy = STRATEGIES[name]
    folded = simulate(strategy, nodes, cluster, unfold=False)
    unfolded = simulate(strategy, nodes, cluster, unfold=True)
    assert folded.stats.rank_classes == 1
    assert unfolded.stats.rank_classes == unfolded.job.world_size
    assert unfolded.trace.step_seconds == pytest.approx(folded.trace.step_seconds, rel=1e-9)
    ranks, spans = unfolded.job.world_size, len(folded.trace.start_seconds)
    assert unfolded.trace.infos == folded.trace.infos
    for field in ("issue_seconds", "start_seconds", "end_seconds"):
        every = getattr(unfolded.trace, field).reshape(ranks, spans)
        np.testing.assert_allclose(every, np.tile(getattr(folded.trace, field), (ranks, 1)), **TOLERANCE)
    for name, load in unfolded.traffic.items():
        assert load == pytest.approx(folded.traffic[name], rel=1e-9)


def test_memory_is_that_of_the_first_rank_either_way() -> None:
    """It holds the largest shards."""
    folded, unfolded = (simulate({"kind": "fsdp2"}, 2, "dgx-h100", unfold=unfold) for unfold in (False, True))
    assert folded.trace.memory is not None
    assert unfolded.trace.memory is not None
    assert set(unfolded.trace.memory.ranks.tolist()) == {0}
    assert unfolded.trace.memory.deltas.tolist() == folded.trace.memory.deltas.tolist()
    np.testing.assert_allclose(
        unfolded.trace.memory.host_seconds, folded.trace.memory.host_seconds, **TOLERANCE
    )
