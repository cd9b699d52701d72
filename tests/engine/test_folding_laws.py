"""Ranks that one rank stands for do what they would do by themselves: on any cluster, with any fault, under
any framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zsim.engine.simulate import simulate_job
from zsim.errors import ZsimError
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve

DENSE = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4096, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
EXPERTS = {**DENSE, "model_type": "mixtral", "num_local_experts": 16, "num_experts_per_tok": 2}
MADE_UP = {"source": "made up for a test", "evidence": "assumed"}
UNEVEN: dict[str, dict[str, Any]] = {
    # step 1.3 % short, single ops up to 28 %: replicas' reductions cross uplinks that shards load unlike
    "replicas on PCIe, four staged cards": {
        "cluster": {
            "extends": "l40s-x8",
            "nic": {"per_node": 4, "gpudirect": False, "attached": "switch", "bandwidth": "50 GB/s"},
        },
        "strategy": {"kind": "fsdp2", "replicate": 8},
    },
    # 0.4 % short
    "replicas on PCIe, two cards": {
        "nodes": 6,
        "cluster": {"extends": "aws-g5", "nic": {"per_node": 2, "bandwidth": "50 GB/s"}},
        "strategy": {"kind": "fsdp2", "replicate": 12},
    },
    # 0.05 % long
    "replicas on PCIe, hashed": {
        "cluster": {
            "extends": "a100-pcie-x8", "nic": {"per_node": 1, "bandwidth": "50 GB/s"},
            "network": {
                **MADE_UP, "kind": "fat-tree", "nodes_per_leaf": 4, "routing": "hash", "hash_seed": 40,
            },
        },
        "strategy": {"kind": "fsdp2", "replicate": 8},
    },
    # single ops 1.1 %
    "experts on a torus": {
        "nodes": 4,
        "cluster": {
            "extends": "dgx-h100", "network": {**MADE_UP, "kind": "torus", "shape": [2, 2]},
            "nic": {"bandwidth": "5 GB/s"},
        },
        "parallelism": {"expert": 16},
        "strategy": {"kind": "fsdp2"},
        "model": EXPERTS,
    },
    # step 5e-5 short, single copies 6 %: collectives load the PCIe switch of the one card
    "offloading beside one staged card": {
        "nodes": 2,
        "cluster": {
            "extends": "dgx-2",
            "nic": {"gpudirect": False, "attached": "switch", "per_node": 1, "bandwidth": "10 GB/s"},
        },
        "strategy": {"kind": "fsdp2", "cpu_offload": True},
        "training": {"precision": "fp16"},
    },
}  # fmt: skip


def job_of(file: dict[str, Any]) -> Job:
    """The job of an experiment whose host does not hide the links: 256 tokens a GPU, two micro-batches."""
    file = {"nodes": 8, "model": DENSE, **file}
    cluster = {"host": {"overhead_factor": 0.02, **MADE_UP}, **file["cluster"]}
    training = {"sequence_length": 256, "micro_batch_size": 1, "gradient_accumulation_steps": 2}
    file = {**file, "cluster": cluster, "training": {**training, **file.get("training", {})}}
    return resolve(build_experiment(file, {}, origin="test"))


def assert_folded_equals_unfolded(job: Job) -> None:
    """Step, and every span of every rank: to 1e-9."""
    folded, unfolded = (simulate_job(job, unfold=unfold) for unfold in (False, True))
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)
    if len(folded.plan.programs) > 1:
        return  # ranks have spans of their own
    spans = len(folded.trace.infos)
    ours = folded.trace.end_seconds.reshape(-1, spans)[folded.classes.class_of_rank]
    every = unfolded.trace.end_seconds.reshape(-1, spans)
    np.testing.assert_allclose(ours, every, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", UNEVEN)
def test_links_that_groups_share_unlike_tell_ranks_apart(name: str) -> None:
    """All of these were folded to one rank, because groups of each kind have equal rings; the first comments
    say by how much that was wrong."""
    assert_folded_equals_unfolded(job_of(UNEVEN[name]))


def _deepspeed(stage: int, **zero: Any) -> dict[str, Any]:
    config = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    version = {"version": "0.19.6"} if "mics_shard_size" in zero else {}  # removed in the next
    return {
        "kind": "deepspeed",
        **version,
        "config": {**config, "zero_optimization": {"stage": stage, **zero}},
    }


CPU = {"device": "cpu"}
FRAMEWORKS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": {"kind": "ddp"}},
    "fsdp1": {"strategy": {"kind": "fsdp1", "sharding_strategy": "HYBRID_SHARD"}},
    "fsdp2": {"strategy": {"kind": "fsdp2"}},
    "hsdp": {"strategy": {"kind": "fsdp2", "replicate": 2}},
    "hsdp of small shards": {"strategy": {"kind": "fsdp2", "replicate": 8}},
    "fsdp2 on the cpu": {"strategy": {"kind": "fsdp2", "cpu_offload": True}},
    "torchtitan": {"strategy": {"kind": "fsdp2"}, "parallelism": {"tensor": 2}},
    "torchtitan's experts": {"strategy": {"kind": "fsdp2"}, "parallelism": {"expert": 8}, "model": EXPERTS},
    "context": {"strategy": {"kind": "fsdp2"}, "parallelism": {"context": 4}},
    "zero-1": {"strategy": _deepspeed(1)},
    "zero-2 on the cpu": {"strategy": _deepspeed(2, offload_optimizer=CPU)},
    "zero-3": {"strategy": _deepspeed(3)},
    "zero-3 on the cpu": {"strategy": _deepspeed(3, offload_optimizer=CPU, offload_param=CPU)},
    "hpz": {"strategy": _deepspeed(3, zero_hpz_partition_size=4)},
    "mics": {"strategy": _deepspeed(3, mics_shard_size=4)},
    "megatron": {"strategy": {"kind": "megatron"}, "parallelism": {"tensor": 2}},
    "megatron's pipeline": {"strategy": {"kind": "megatron"}, "parallelism": {"tensor": 2, "pipeline": 2}},
    "megatron's experts": {"strategy": {"kind": "megatron"}, "parallelism": {"expert": 4}, "model": EXPERTS},
}  # fmt: skip
CLUSTERS = ("dgx-h100", "aws-p4d", "roce-h100", "rtx-4090-x8", "a100-pcie-x8", "aws-g5", "l40s-x8", "dgx-2")


@st.composite
def networks(draw: st.DrawFn, nodes: int) -> dict[str, Any]:
    kinds = ["single-switch", "fat-tree", "rail-optimized", "dragonfly"] + (["torus"] if nodes == 4 else [])
    kind = draw(st.sampled_from(kinds))
    found: dict[str, Any] = {**MADE_UP, "kind": kind}
    if kind == "torus":
        found["shape"] = [2, 2]
    if kind == "dragonfly":
        found |= {"nodes_per_router": 1, "routers_per_group": 2, "global_links_per_router": 2}
    if kind in ("fat-tree", "rail-optimized"):
        leaf = draw(st.sampled_from([1, 2, 4]))
        found |= {"nodes_per_leaf": leaf, "oversubscription": float(draw(st.sampled_from([1, leaf])))}
    if kind not in ("torus", "single-switch") and draw(st.booleans()):
        found |= {"routing": "hash", "hash_seed": draw(st.integers(0, 50)), "flows_per_pair": 2}
    return found


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """Up to 64 GPUs under any framework: cards few or many, staged or not, hashed or not; faults, uneven and
    scattered nodes."""
    name = draw(st.sampled_from(CLUSTERS))
    nodes = draw(st.sampled_from([1, 2, 3, 4, 8] if name != "dgx-2" else [1, 2, 4]))
    cluster: dict[str, Any] = {"extends": name, "network": draw(networks(nodes))}
    cluster["nic"] = draw(
        st.fixed_dictionaries(
            {"bandwidth": st.sampled_from(["50 GB/s", "5 GB/s"])},
            optional={
                "per_node": st.sampled_from([1, 2, 4]),
                "gpudirect": st.booleans(),
                "attached": st.sampled_from(["host", "switch"]),
            },
        )
    )
    file = {**FRAMEWORKS[draw(st.sampled_from(sorted(FRAMEWORKS)))], "cluster": cluster, "nodes": nodes}
    if name == "dgx-2":
        file["training"] = {"precision": "fp16"}
    places = list(range(nodes))
    if draw(st.integers(0, 3)) == 0:
        places = draw(st.permutations(range(nodes + 2)))[:nodes]
        file["placement"] = {"fabric_nodes": nodes + 2, "nodes": places}
        file["nodes"] = None
    if draw(st.integers(0, 3)) == 0:
        counts = draw(st.lists(st.sampled_from([2, 4, 6, 8]), min_size=nodes, max_size=nodes))
        file["placement"] = {**file.get("placement", {}), "gpus_per_node": counts}
        file["nodes"] = None
    links = [f"node{place}{part}" for place in places for part in ("", ".nic0", ".gpu0.pcie", ".gpu1.nvlink")]
    fault = {
        "bandwidth_fraction": st.sampled_from([0.1, 0.5, 0.9]),
        "added_latency": st.sampled_from(["0 s", "7 us"]),
    }
    file["faults"] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "slow_gpus": st.dictionaries(st.sampled_from(["0", "1"]), st.just(1.3), max_size=2),
                "links": st.dictionaries(st.sampled_from(links), st.fixed_dictionaries(fault), max_size=2),
                "dead_nics": st.lists(st.just(f"node{places[-1]}.nic0"), max_size=1),
            },
        )
    )
    return file


@settings(max_examples=40, deadline=None, derandomize=True)
@given(files())
def test_on_any_small_cluster_folded_equals_unfolded(file: dict[str, Any]) -> None:
    try:
        job = job_of(file)
        simulate_job(job)
    except ZsimError:  # degrees that do not divide the GPUs, cards or links that are not there
        assume(False)
    assert_folded_equals_unfolded(job)
