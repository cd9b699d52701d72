"""Hosts of several types in one job: each node's offloaded work has its own memory, cores and links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.engine.simulate import Outcome, simulate_job
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import fits, node_capacity_bytes, node_peak_bytes, pinned_limit_violation
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

_ZERO = {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
_OFFLOAD = {
    "kind": "deepspeed", "config": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": _ZERO},
}  # fmt: skip


def experiment(cluster: dict[str, Any]) -> Experiment:
    model = {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 8000, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    given = {
        "model": model, "cluster": cluster, "training": {"sequence_length": 1024}, "strategy": _OFFLOAD,
    }  # fmt: skip
    return build_experiment(given, {}, origin="test")


def other_host(folder: Path, **host: object) -> str:
    """A file of DGX H100 whose host differs."""
    path = folder / "other.toml"
    keys = "\n".join(f"{key} = {value!r}" for key, value in host.items()).replace("'", '"')
    path.write_text(f'schema = 1\nextends = "dgx-h100"\nname = "other"\n[host]\n{keys}\n')
    return str(path)


def adam_seconds(outcome: Outcome, rank: int) -> float:
    """The seconds of the update on the CPU, of a rank."""
    mine = outcome.trace.select_rank(rank)
    names = [mine.infos[number].name for number in mine.info_indices]
    place = names.index("optimizer step of sub-group 0")
    return float(mine.end_seconds[place] - mine.start_seconds[place])


def test_the_cpu_of_each_node_updates_at_its_own_rate(tmp_path: Path) -> None:
    """A quarter of the memory's bandwidth: an update of the same bytes takes four times as long, whichever
    node comes first."""
    plain = load_cluster("dgx-h100").host.memory_bandwidth
    other = other_host(tmp_path, memory_bandwidth=f"{plain / 4e9:.6f} GB/s")
    for names, slow in ((["dgx-h100", other], 8), ([other, "dgx-h100"], 0)):
        outcome = simulate_job(resolve(experiment({"nodes": [{"like": name} for name in names]})))
        of_rank = {rank: adam_seconds(outcome, rank) for rank in outcome.classes.representatives}
        assert of_rank[slow] == pytest.approx(4 * of_rank[8 - slow], rel=1e-3)


def test_a_node_with_little_memory_of_its_own_does_not_fit(tmp_path: Path) -> None:
    """The first node has 2 TB; the second 0.1 GB, less than its ranks' states take."""
    cluster = {"nodes": [{"like": "dgx-h100"}, {"like": other_host(tmp_path, memory="0.1 GB")}]}
    asked = experiment(cluster)
    job = resolve(asked)
    plan = make_plan(job)
    assert node_capacity_bytes(job, plan)["host"] == 100_000_000 < node_peak_bytes(job, plan, "host")
    assert not fits(job, plan)
    report = zsim.simulate(asked).report
    assert report.out_of_memory is not None
    assert (report.out_of_memory.pool, report.out_of_memory.rank) == ("host", 8)
    assert report.capacity_bytes["host"] == 100_000_000


def test_what_a_node_may_lock_is_its_own(tmp_path: Path) -> None:
    """The first has no limit, the second one of 1 MB."""
    cluster = {"nodes": [{"like": "dgx-h100"}, {"like": other_host(tmp_path, pinned_limit="1 MB")}]}
    job = resolve(experiment(cluster))
    over = pinned_limit_violation(job, make_plan(job))
    assert over is not None
    assert over[0] > over[1] == 1_000_000
