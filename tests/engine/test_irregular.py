"""Irregular clusters: what a straggler, a bad link or an odd placement costs, folded as unfolded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zsim
from zsim.engine.simulate import Outcome, simulate_job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

HSDP = {"kind": "fsdp2", "replicate": 2}
ZERO3 = {"kind": "deepspeed", "stage": 3}
OFFLOAD = {
    "kind": "deepspeed",
    "config": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    },
}
TWO_LAYERS = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 8000, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
STRAGGLER = {"faults": {"slow_gpus": {"5": 1.3}}}
IRREGULAR: dict[str, dict[str, Any]] = {
    "straggler": STRAGGLER,
    "straggler of HSDP": {**STRAGGLER, "strategy": HSDP},
    "straggler of half-node replicas": {**STRAGGLER, "strategy": {"kind": "fsdp2", "replicate": 4}},
    "straggler of DDP": {**STRAGGLER, "strategy": {"kind": "ddp"}},
    "straggler of ZeRO-3": {**STRAGGLER, "strategy": ZERO3},
    "straggler of offloaded ZeRO-2": {**STRAGGLER, "strategy": OFFLOAD},
    "straggler on 4 cards for 8": {**STRAGGLER, "strategy": HSDP, "cluster": "aws-p4d", "nodes": 4},
    "straggler without NVLink": {**STRAGGLER, "strategy": HSDP, "cluster": "rtx-4090-x8"},
    "two stragglers": {"faults": {"slow_gpus": {"5": 1.3, "node1.gpu2": 1.1}}, "strategy": HSDP},
    "slow node": {"faults": {"slow_gpus": {"node1": 1.2}}, "strategy": HSDP, "nodes": 4},
    "degraded card": {"faults": {"links": {"node1.nic2": {"bandwidth_fraction": 0.25}}}, "strategy": HSDP},
    "degraded NVLink": {
        "faults": {"links": {"node1.gpu2.nvlink": {"bandwidth_fraction": 0.1, "added_latency": "9 us"}}},
        "strategy": HSDP,
    },
    "late card": {"faults": {"links": {"node1.nic2": {"added_latency": "50 us"}}}, "strategy": HSDP},
    "degraded PCIe under offload": {
        "faults": {"links": {"node1.gpu2.pcie": {"bandwidth_fraction": 0.2}}}, "strategy": OFFLOAD,
    },
    "dead card": {"faults": {"dead_nics": ["node1.nic2"]}},
    "dead card of HSDP": {"faults": {"dead_nics": ["node1.nic2"]}, "strategy": HSDP},
    "dead card of 4 for 8": {
        "faults": {"dead_nics": ["node1.nic2"]}, "strategy": HSDP, "cluster": "aws-p4d", "nodes": 4,
    },
    "uneven nodes": {"placement": {"gpus_per_node": [8, 4]}, "nodes": None},
    "uneven nodes offload": {
        "placement": {"gpus_per_node": [8, 4]}, "nodes": None, "strategy": OFFLOAD,
    },
    "groups across uneven nodes": {
        "placement": {"gpus_per_node": [8, 4]}, "nodes": None, "strategy": {"kind": "fsdp2", "replicate": 2},
    },
    "trees across uneven nodes": {
        "placement": {"gpus_per_node": [8, 4, 2]}, "nodes": None, "strategy": {"kind": "ddp"},
    },
    "scattered nodes": {
        "placement": {"fabric_nodes": 6, "nodes": [4, 0, 5, 2]}, "nodes": None, "strategy": HSDP,
        "cluster": "roce-h100",
    },
    "random nodes": {
        "placement": {"fabric_nodes": 64, "policy": "random", "seed": 3}, "nodes": 4, "strategy": HSDP,
        "cluster": "dgx-superpod-h100",
    },
    "nodes over leaves": {
        "placement": {"fabric_nodes": 96, "policy": "spread"}, "nodes": 4, "strategy": HSDP,
        "cluster": "dgx-superpod-h100",
    },
    "all at once": {
        "placement": {"fabric_nodes": 6, "nodes": [4, 0, 5], "gpus_per_node": [8, 8, 4]}, "nodes": None,
        "cluster": "roce-h100",
        "faults": {
            "slow_gpus": {"3": 1.1}, "dead_nics": ["node4.nic1"],
            "links": {"node0.nic2": {"bandwidth_fraction": 0.5, "added_latency": "3 us"}},
        },
    },
}  # fmt: skip


def simulate(irregular: dict[str, Any], *, unfold: bool = False) -> Outcome:
    experiment: dict[str, Any] = {
        "model": "gpt2",
        "cluster": "dgx-h100",
        "nodes": 2,
        "training": {"sequence_length": 512, "micro_batch_size": 1},
        "strategy": {"kind": "fsdp2"},
    }
    return simulate_job(resolve(Experiment(**experiment | irregular)), unfold=unfold)


@pytest.mark.parametrize("name", IRREGULAR)
def test_folded_equals_unfolded(name: str) -> None:
    """Step, every span of every rank (its class's), traffic of every class of links: to 1e-9."""
    folded, unfolded = (simulate(IRREGULAR[name], unfold=unfold) for unfold in (False, True))
    assert folded.stats.rank_classes < unfolded.stats.rank_classes == unfolded.job.world_size
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)
    spans = len(folded.trace.infos)
    for field in ("issue_seconds", "start_seconds", "end_seconds"):
        ours = getattr(folded.trace, field).reshape(-1, spans)
        every = getattr(unfolded.trace, field).reshape(-1, spans)
        np.testing.assert_allclose(ours[folded.classes.class_of_rank], every, rtol=1e-9, atol=1e-12)
    for kind, load in unfolded.traffic.items():
        assert folded.traffic[kind] == pytest.approx(load, rel=1e-9)
    assert folded.devices == unfolded.devices or [d.name for d in folded.devices] == [
        d.name for d in unfolded.devices
    ]


def kernels(outcome: Outcome, rank: int) -> float:
    """Seconds of all kernels of a rank."""
    own = outcome.trace.select_rank(rank)
    return sum(
        end - start for _, info, start, end in own.rows() if info.kind in ("compute", "optimizer", "copy")
    )


def test_a_slow_gpu_slows_every_rank_by_exactly_its_own_delay() -> None:
    """DDP with one bucket, GPU-bound: all ranks meet once, after backward. The step is longer by 0.3 of the
    straggler's own kernels, to the last digit, and the others wait that long."""
    ddp = {
        "model": "llama-3.2-1b",
        "training": {"sequence_length": 2048, "micro_batch_size": 4},
        "strategy": {"kind": "ddp", "bucket_cap_mb": 100000},
    }
    whole, slow = simulate(ddp), simulate({**ddp, **STRAGGLER})
    delay = 0.3 * kernels(whole, 0)
    assert slow.trace.step_seconds - whole.trace.step_seconds == pytest.approx(delay, rel=1e-9)
    assert kernels(slow, 5) == pytest.approx(1.3 * kernels(whole, 0))
    assert kernels(slow, 0) == pytest.approx(kernels(whole, 0))


def test_every_collective_ends_for_all_when_the_straggler_has_had_it() -> None:
    """ZeRO-3 synchronises at every gather: they end at one time for both classes, and the class that waits
    has the longer span."""
    slow = simulate({**STRAGGLER, "strategy": ZERO3})
    spans = len(slow.trace.infos)
    ends = slow.trace.end_seconds.reshape(-1, spans)
    starts = slow.trace.start_seconds.reshape(-1, spans)
    is_collective = np.array([bool(info.group) for info in slow.trace.infos])
    np.testing.assert_array_equal(ends[0, is_collective], ends[1, is_collective])
    assert (starts[0, is_collective] <= starts[1, is_collective]).all()


@pytest.mark.parametrize(
    ("name", "classes"),
    [("degraded card of the world", 1), ("dead card", 1), ("straggler", 2), ("uneven nodes", 1)],
)
def test_classes_split_only_as_far_as_needed(name: str, classes: int) -> None:
    """A bad link slows a group of all ranks, and all of them alike; a straggler is a class of its own."""
    bad = {"faults": {"links": {"node1.nic2": {"bandwidth_fraction": 0.25}}}}
    assert simulate(IRREGULAR.get(name, bad)).stats.rank_classes == classes


def test_hsdp_splits_into_the_straggler_its_shard_its_replicas_and_the_rest() -> None:
    outcome = simulate({**STRAGGLER, "strategy": {"kind": "fsdp2", "replicate": 4}, "nodes": 4})
    assert outcome.classes.sizes.tolist() == [7, 1, 21, 3]


def test_a_packed_job_sends_less_through_the_spine_than_a_spread_one() -> None:
    """Four nodes under one leaf, or two under each of two, on a SuperPOD whose leaves are 8 to 1."""
    network = {
        "source": "made up for a test", "evidence": "assumed", "kind": "fat-tree", "nodes_per_leaf": 4,
        "oversubscription": 8.0,
    }  # fmt: skip
    host = {"source": "made up: no step waits for it", "evidence": "assumed", "overhead_factor": 0.1}
    cluster = {"extends": "dgx-h100", "network": network, "host": host}
    job = {"cluster": cluster, "nodes": 4, "model": "llama-3.2-1b"}
    packed = simulate({**job, "placement": {"fabric_nodes": 8}})
    spread = simulate({**job, "placement": {"fabric_nodes": 8, "policy": "spread"}})
    assert packed.traffic["leaf_up"].total_bytes == 0
    assert spread.traffic["leaf_up"].total_bytes > 0
    assert spread.trace.step_seconds > 1.1 * packed.trace.step_seconds


def test_a_job_that_is_too_large_is_told_how_many_whole_gpus_would_do() -> None:
    """Without the faults and the placement, which are about the GPUs it has now."""
    experiment = Experiment(
        model="llama-2-13b", cluster="dgx-h100", placement={"gpus_per_node": [2]}, strategy={"kind": "fsdp2"},
        faults={"slow_gpus": {"1": 1.5}},
    )  # fmt: skip
    report = zsim.simulate(experiment).report
    assert not report.fits
    assert report.out_of_memory is not None
    assert report.out_of_memory.least_gpus is not None


STRATEGIES = [{"kind": "fsdp2"}, {"kind": "fsdp2", "replicate": 4}, {"kind": "ddp"}, ZERO3]
LINKS = [
    "node0.nic1",
    "node2.nic7",
    "node1",
    "node3.gpu0.nvlink",
    "node2.gpu3.pcie",
    "network",
    "leaf0-spine1",
]


@st.composite
def irregularities(draw: st.DrawFn) -> dict[str, Any]:
    """A few of everything on four nodes of a fabric of six, two to a leaf."""
    ranks = st.sampled_from([str(rank) for rank in range(32)])
    fault = st.fixed_dictionaries(
        {
            "bandwidth_fraction": st.sampled_from([0.1, 0.5, 0.9]),
            "added_latency": st.sampled_from(["0 s", "7 us"]),
        }
    )
    return {
        "strategy": draw(st.sampled_from(STRATEGIES)),
        "placement": {"fabric_nodes": 6, "nodes": draw(st.permutations(range(6)))[:4]},
        "faults": {
            "slow_gpus": draw(st.dictionaries(ranks, st.sampled_from([1.1, 1.5]), max_size=3)),
            "links": draw(st.dictionaries(st.sampled_from(LINKS), fault, max_size=2)),
            "dead_nics": draw(
                st.lists(st.sampled_from(["node0.nic1", "node4.nic0"]), max_size=2, unique=True)
            ),
        },
    }


@settings(max_examples=12, deadline=None, derandomize=True)
@given(irregularities())
def test_whatever_is_wrong_folded_equals_unfolded(irregular: dict[str, Any]) -> None:
    network = {
        "source": "made up for a test", "evidence": "assumed", "kind": "fat-tree", "nodes_per_leaf": 2,
        "oversubscription": 4.0,
    }  # fmt: skip
    whole = {
        **irregular, "nodes": None, "cluster": {"extends": "dgx-h100", "network": network},
        "model": TWO_LAYERS,
    }  # fmt: skip
    folded, unfolded = (simulate(whole, unfold=unfold) for unfold in (False, True))
    spans = len(folded.trace.infos)
    ours = folded.trace.end_seconds.reshape(-1, spans)[folded.classes.class_of_rank]
    np.testing.assert_allclose(ours, unfolded.trace.end_seconds.reshape(-1, spans), rtol=1e-9, atol=1e-12)
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)
