"""The least GPUs that would do."""

from __future__ import annotations

import zsim
from zsim.study.search import least_gpus


def test_numbers_of_gpus_that_a_plan_refuses_are_passed_over() -> None:
    """Hybrid FSDP1 with two replicas has no plan on two GPUs, where one rank is left to a group."""
    experiment = zsim.Experiment(
        model="gpt2-xl",
        cluster="dgx-a100-40gb",
        nodes=2,
        training={"sequence_length": 1024, "micro_batch_size": 16},
        strategy={"kind": "fsdp1", "sharding_strategy": "HYBRID_SHARD", "replicate": 2},
    )
    assert not zsim.simulate(experiment).report.fits
    found = least_gpus(experiment)
    assert found is None or found > 2
