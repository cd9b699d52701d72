"""GPUs of several types in one job: the slowest sets the pace, each type has its own prices and limits."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simpy
from rich.console import Console

import zsim
from zsim.engine.prepare import StepRequest, prepare
from zsim.engine.priced_program import PricedProgram
from zsim.engine.simulate import simulate_job
from zsim.errors import InputError, NotSimulatedError
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import excess_bytes, fits, program_peak_bytes, usable_bytes
from zsim.plan.node_types import gpu_of
from zsim.report.report import Report
from zsim.report.views.html.report import report_plots
from zsim.report.views.text.report import print_report
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.job import job_topology
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.training import workspace_bytes
from zsim.study.search import least_gpus

TWO_LAYERS = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 8000, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
TWO_KINDS = {"nodes": "1 dgx-h100, 1 dgx-a100-80gb"}
TWO_GPUS = {"extends": "dgx-h100", "nodes": [{"gpu": "h100-sxm-80gb"}, {"gpu": "a100-sxm-80gb"}]}
MEGATRON = {"kind": "megatron", "distributed_optimizer": True}
TWO_SIZES = [{"gpu": "h100-sxm-80gb"}, {"gpu": "a100-sxm-40gb"}]
FOUR = {"sequence_length": 1024, "gradient_accumulation_steps": 4}
PIPELINE = {"parallelism": {"pipeline": 2}, "training": FOUR}
ACROSS = {"parallelism": {"pipeline": 2, "order": "tp-cp-ep-pp-dp"}, "training": FOUR}
MIXED: dict[str, dict[str, Any]] = {
    "FSDP2": {},
    "FSDP2, GPUs alone": {"cluster": TWO_GPUS},
    "FSDP1": {"strategy": {"kind": "fsdp1"}},
    "HSDP": {"strategy": {"kind": "fsdp2", "replicate": 2}},
    "DDP": {"strategy": {"kind": "ddp"}},
    "ZeRO-1": {"strategy": {"kind": "deepspeed", "stage": 1}},
    "ZeRO-3": {"strategy": {"kind": "deepspeed", "stage": 3}},
    "Megatron": {"strategy": MEGATRON},
    "a stage on each type": {"strategy": MEGATRON, **PIPELINE},
    "stages on both types": {"strategy": MEGATRON, **ACROSS},
    "torch, both types": {"parallelism": {"pipeline": 2, "order": "tp-cp-pp-dp"}, "training": FOUR},
    "tensor parallelism in each node": {"strategy": MEGATRON, "parallelism": {"tensor": 2}, "training": FOUR},
    "uneven micro-batches": {"training": {"sequence_length": 1024, "micro_batch_size": {"dgx-h100": 2}}},
    "two nodes and one": {"cluster": {"nodes": "2 dgx-h100, 1 dgx-a100-80gb"}},
    "the slow node first": {"placement": {"nodes": [1, 0]}},
    "a dead card": {"faults": {"dead_nics": ["node1.nic2"], "slow_gpus": {"3": 1.5}}},
}  # fmt: skip


def experiment(**changes: Any) -> Experiment:
    given = {
        "model": TWO_LAYERS, "cluster": TWO_KINDS, "training": {"sequence_length": 1024},
        "strategy": {"kind": "fsdp2"}, **changes,
    }  # fmt: skip
    return build_experiment(given, {}, origin="test")


def simulated(**changes: Any) -> Report:
    return zsim.simulate(experiment(**changes)).report


@pytest.mark.parametrize("name", MIXED)
def test_folded_equals_unfolded_on_two_types_of_nodes(name: str) -> None:
    job = resolve(experiment(**MIXED[name]))
    folded, whole = simulate_job(job), simulate_job(job, unfold=True)
    assert folded.trace.step_seconds == pytest.approx(whole.trace.step_seconds, rel=1e-9)
    assert len(folded.classes.representatives) <= 6 < job.world_size == whole.stats.rank_classes
    for rank in folded.classes.representatives:
        one, other = folded.trace.select_rank(rank), whole.trace.select_rank(rank)
        np.testing.assert_allclose(one.end_seconds, other.end_seconds, rtol=1e-9)


def test_each_type_has_the_prices_of_a_job_of_its_own() -> None:
    """Kernels and the host's calls cost H100s as on two DGX H100, A100s as on two DGX A100: of itself torch
    takes cuDNN's attention on Hopper and FlashAttention-2's on Ampere."""
    both = _priced(experiment())
    for number, name in enumerate(("dgx-h100", "dgx-a100-80gb")):
        (alone,) = _priced(experiment(cluster=name, nodes=2))
        assert both[number].kernel_seconds == alone.kernel_seconds
        assert both[number].host_seconds == alone.host_seconds
    assert both[0].kernel_seconds != both[1].kernel_seconds


def _priced(asked: Experiment) -> tuple[PricedProgram, ...]:
    one = simulate_job(resolve(asked))
    request = StepRequest(one.job, one.plan, one.topology, one.slowdowns, is_steady=False)
    return prepare(request, one.classes, simpy.Environment()).programs


def test_two_types_with_the_same_numbers_are_one() -> None:
    """Nodes that differ in name alone take as long as nodes that are alike."""
    plain = simulated(cluster="dgx-h100", nodes=2)
    twice = simulated(cluster={"extends": "dgx-h100", "nodes": [{"gpu": "h100-sxm-80gb"}] * 2})
    assert twice.step_seconds == pytest.approx(plain.step_seconds, rel=1e-9)
    assert twice.peaks["gpu"].total == plain.peaks["gpu"].total
    assert all(row.lost_fraction < 1e-9 for row in twice.gpu_types)
    assert twice.energy is not None
    assert plain.energy is not None
    assert twice.energy.joules == pytest.approx(plain.energy.joules, rel=1e-6)


def test_the_report_says_what_the_fast_ones_lose() -> None:
    """4,096 tokens a micro-batch are compute-bound: the H100s wait for the A100s, by the difference of their
    waits w; of a step t, 8 GPUs lose 24 x 8 x w / t GPU-hours a day."""
    report = simulated(training={"sequence_length": 4096, "micro_batch_size": 4}, cluster=TWO_GPUS)
    fast, slow = report.gpu_types
    assert (fast.gpu, slow.gpu) == ("h100-sxm-80gb", "a100-sxm-80gb")
    assert (
        slow.lost_seconds
        == 0
        < fast.lost_seconds
        == pytest.approx(fast.waiting_seconds - slow.waiting_seconds)
    )
    assert fast.lost_fraction > 0.3
    lost = 24 * 8 * fast.lost_seconds / report.step_seconds
    assert fast.lost_gpu_hours_per_day == pytest.approx(lost)
    assert any(
        "a100-sxm-80gb sets the pace: each of the 8 GPUs of h100-sxm-80gb idles" in n for n in report.notes
    )
    assert report.rank == 8  # an A100, whose breakdown has no waits for the H100s
    assert sum(report.breakdown.seconds.values()) == pytest.approx(report.step_seconds)
    assert [row["gpu"] for row in report.to_dict()["gpu_types"]] == ["h100-sxm-80gb", "a100-sxm-80gb"]


def test_the_page_draws_the_gpu_with_the_least_room_as_the_report_does() -> None:
    """The H100 holds more with 8 sequences a micro-batch, but the A100 of 40 GB with 6 has less room left."""
    outcome = zsim.simulate(experiment(
        training={"sequence_length": 4096, "micro_batch_size": {"h100-sxm-80gb": 8, "a100-sxm-40gb": 6}},
        cluster={"extends": "dgx-h100", "nodes": TWO_SIZES},
    ))  # fmt: skip
    report = outcome.report
    fast, slow = (row.peak_bytes for row in report.gpu_types)
    assert fast > slow == report.peaks["gpu"].total
    levels = np.sum([trace["y"] for trace in report_plots(report, outcome.trace)["memory"]().data], axis=0)
    assert levels.max() * 1e9 == pytest.approx(slow)


def test_larger_micro_batches_on_the_fast_ones_lose_less() -> None:
    even = simulated(training={"sequence_length": 4096, "micro_batch_size": 2}, cluster=TWO_GPUS)
    sizes = {"h100-sxm-80gb": 4, "a100-sxm-80gb": 2}
    uneven = simulated(training={"sequence_length": 4096, "micro_batch_size": sizes}, cluster=TWO_GPUS)
    assert uneven.gpu_types[0].lost_seconds < even.gpu_types[0].lost_seconds
    assert (even.step_tokens, uneven.step_tokens) == (16 * 2 * 4096, 8 * (4 + 2) * 4096)
    tokens = [report.step_tokens / report.step_seconds for report in (even, uneven)]
    assert tokens[1] > 1.2 * tokens[0]
    assert [row.micro_batch_size for row in uneven.gpu_types] == [4, 2]
    assert any("averages gradients over ranks" in note for note in uneven.notes)
    assert uneven.gpu_types[0].peak_bytes > uneven.gpu_types[1].peak_bytes


def test_a_global_batch_makes_micro_batches_of_uneven_ranks() -> None:
    """8 x 2 + 8 x 1 = 24 sequences at a time: 48 are two micro-batches."""
    sizes = {"sequence_length": 1024, "micro_batch_sizes": {"dgx-h100": 2}}
    job = resolve(experiment(training={**sizes, "global_batch_size": 48}))
    assert (job.training.gradient_accumulation_steps, job.micro_batch_sizes) == (2, (2, 1))
    with pytest.raises(
        InputError, match=r"found 50, .* has 24 sequences .*; expected a multiple, like 48 or 72"
    ):
        resolve(experiment(training={**sizes, "global_batch_size": 50}))


def test_memory_is_judged_by_type() -> None:
    """The same bytes fit 80 GB and not 40 GB; the first rank over its capacity is the A100's."""
    cluster = {"extends": "dgx-h100", "nodes": [{"gpu": "h100-sxm-80gb"}, {"gpu": "a100-sxm-40gb"}]}
    training = {"sequence_length": 4096, "micro_batch_size": 46}
    job = resolve(experiment(cluster=cluster, training=training))
    plan = make_plan(job)
    peaks = [program_peak_bytes(job, plan, number) for number in range(2)]
    usable = [usable_bytes(job.cluster, gpu_of(job, plan, number)) for number in range(2)]
    assert peaks[0] - peaks[1] == 2 * (workspace_bytes(9.0) - workspace_bytes(8.0))  # cuBLAS's
    assert usable[1] < peaks[0] < usable[0]
    assert excess_bytes(job, plan) == peaks[1] - usable[1]
    assert not fits(job, plan)
    report = simulated(cluster=cluster, training=training)
    assert [row.fits for row in report.gpu_types] == [True, False]
    assert report.out_of_memory is not None
    assert report.out_of_memory.rank == 8
    assert report.capacity_bytes["gpu"] == report.out_of_memory.capacity_bytes == usable[1]
    small = {"h100-sxm-80gb": 46, "a100-sxm-40gb": 4}
    assert simulated(cluster=cluster, training={**training, "micro_batch_size": small}).fits


def test_the_allocator_of_the_smaller_gpu_holds_up_all() -> None:
    """Tensors fit both, but the 40 GB allocator gives its cache back in every step, and the others wait."""
    cluster = {"extends": "dgx-h100", "nodes": [{"gpu": "h100-sxm-80gb"}, {"gpu": "a100-sxm-40gb"}]}
    short = simulated(cluster=cluster, training={"sequence_length": 4096, "micro_batch_size": 43})
    assert short.fits
    assert short.allocator is not None
    assert short.allocator.retries > 0
    assert short.allocator.limit_bytes < 43e9
    assert short.breakdown.seconds["allocator"] > 0
    assert short.rank == 8


def test_links_of_the_slower_type_hold_up_a_ring() -> None:
    """DGX A100's cards have 200 Gb/s of DGX H100's 400: an all-gather over both takes as long as over two
    DGX A100 when its bytes do; NVLink and PCIe of the second node are slower alike."""
    job = resolve(experiment())
    topology = job_topology(job)
    capacities = topology.capacities()
    for name, of_node in (("nic_out", 8), ("nvlink_out", 8), ("pcie_up", 8)):
        links = topology.classes[name]
        first, second = capacities[links.first], capacities[links.first + of_node]
        a100 = load_cluster("dgx-a100-80gb")
        expected = {
            "nic_out": a100.nic.bandwidth * a100.nic.efficiency,
            "nvlink_out": a100.node_link.bandwidth * a100.node_link.efficiency,
            "pcie_up": a100.pcie.bandwidth * a100.pcie.efficiency,
        }[name]
        assert second == pytest.approx(expected)
        assert first > second


def test_cards_of_another_number_share_what_the_node_has() -> None:
    """AWS p4d has 4 cards of 100 Gb/s: as 8 cards of half of that beside DGX A100's 8."""
    job = resolve(experiment(cluster={"nodes": "1 dgx-a100-40gb, 1 aws-p4d"}))
    topology = job_topology(job)
    links = topology.classes["nic_out"]
    p4d = load_cluster("aws-p4d").nic
    assert topology.capacities()[links.first + 8 : links.first + 16].sum() == pytest.approx(
        p4d.per_node * p4d.bandwidth * p4d.efficiency
    )


def test_a_file_lists_its_nodes(tmp_path: Path) -> None:
    path = tmp_path / "both.toml"
    path.write_text(
        'schema = 1\nextends = "dgx-h100"\n[[nodes]]\ngpu = "h100-sxm-80gb"\ncount = 2\n'
        '[[nodes]]\nlike = "dgx-a100-80gb"\n'
    )
    cluster = load_cluster(path)
    assert cluster.node_type_indices.tolist() == [0, 0, 1]
    assert cluster.gpu_label == "h100-sxm-80gb + a100-sxm-80gb"
    job = resolve(build_experiment(
        {"model": TWO_LAYERS, "cluster": "dgx-h100", "nodes": 16}, {"cluster": str(path)}, origin="test"
    ))  # fmt: skip
    assert (job.num_nodes, job.rank_types.tolist()) == (3, [0] * 16 + [1] * 8)


H100_2 = {"micro_batch_sizes": {"dgx-h100": 2}}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "fewer nodes": (
        {"nodes": 1},
        r'has 2 nodes \(1 dgx-h100, 1 dgx-a100-80gb\); .*: placement.nodes = "0"',
    ),
    "more nodes": ({"nodes": 3}, r"nodes: found 3, but cluster .* has 2 nodes .*; expected 2"),
    "another fabric": ({"placement": {"fabric_nodes": 4}}, r"placement.fabric_nodes: found 4, but cluster"),
    "name": (
        {"cluster": {"nodes": "1 dgx-h100, 1 dgx-a100"}},
        r"unknown GPU or cluster 'dgx-a100'; did you mean 'dgx-a100-40gb'",
    ),
    "no count": ({"cluster": {"nodes": "dgx-h100"}}, r"found 'dgx-h100', expected a number of nodes and"),
    "links": (
        {"cluster": {"nodes": "1 dgx-h100, 1 rtx-4090-x8"}},
        r"'rtx-4090-x8' has node_link.kind none, but 'dgx-h100' switch",
    ),
    "vendors": (
        {"cluster": {"nodes": "1 dgx-h100, 1 mi300x-x8"}},
        r"GPUs of vendor 'amd', but 'dgx-h100' of 'nvidia'",
    ),
    "type": (
        {"training": {"micro_batch_sizes": {"dgx-h10": 2}}},
        r"unknown type of nodes 'dgx-h10'; did you mean 'dgx-h100'",
    ),
    "ZeRO": (
        {"training": H100_2, "strategy": {"kind": "deepspeed", "stage": 3}},
        r"DeepSpeed has one train_micro_batch_size_per_gpu",
    ),
    "Megatron": ({"training": H100_2, "strategy": MEGATRON}, r"Megatron has one --micro-batch-size"),
    "tensor": (
        {"training": H100_2, "parallelism": {"tensor": 2}},
        r"several sizes with model parallelism",
    ),
    "alike": (
        {"cluster": "dgx-h100", "nodes": 1, "training": H100_2},
        r"all nodes of cluster 'dgx-h100' are alike",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_told_in_one_sentence(name: str) -> None:
    changes, words = WRONG[name]
    with pytest.raises(InputError, match=words):
        resolve(experiment(**changes))


def test_what_no_type_has_is_told_by_its_gpu() -> None:
    """Volta has no bf16: on both, fp16 is the default and bf16 an error; alone, H100s have it."""
    cluster = {"extends": "dgx-h100", "nodes": [{"gpu": "h100-sxm-80gb"}, {"gpu": "v100-sxm2-16gb"}]}
    job = resolve(experiment(cluster=cluster))
    assert (job.training.precision, job.training.attention) == ("fp16", "math")
    with pytest.raises(InputError, match="GPU 'v100-sxm2-16gb' has no bf16 arithmetic"):
        resolve(experiment(cluster=cluster, training={"precision": "bf16"}))
    on_first = resolve(experiment(cluster=cluster, placement={"nodes": [0]}))
    assert (on_first.training.precision, on_first.training.attention) == ("bf16", "flash")


def test_jitter_draws_ranks_of_each_type_but_no_pipeline_of_both() -> None:
    drawn = simulated(jitter={"seed": 1, "steps": 3})
    assert drawn.jitter is not None
    assert drawn.jitter.steps == 3
    with pytest.raises(NotSimulatedError, match="a pipeline on nodes of several types"):
        simulated(strategy=MEGATRON, **ACROSS, jitter={"seed": 1, "steps": 3})


def test_a_pipeline_has_a_row_per_pipeline_rank_of_the_slower_type() -> None:
    report = simulated(strategy=MEGATRON, **ACROSS)
    assert report.pipeline is not None
    assert [row.rank for row in report.pipeline.rows] == [0, 1]
    assert [row.first_rank for row in report.pipeline.rows] == [8, 9]  # A100s


def test_the_terminal_has_a_row_per_type_within_80_columns() -> None:
    sizes = {"sequence_length": 1024, "micro_batch_sizes": {"dgx-h100": 4}, "micro_batch_size": 2}
    text = StringIO()
    print_report(simulated(training=sizes), Console(file=text, width=80))
    rows = [
        line.split() for line in text.getvalue().splitlines() if line.startswith(("dgx-h100 ", "dgx-a100"))
    ]
    assert [row[:4] for row in rows] == [["dgx-h100", "8", "x", "4"], ["dgx-a100-80gb", "8", "x", "2"]]


def test_as_many_more_of_each_type_as_would_hold_the_job() -> None:
    """13 billion parameters under FSDP2 beside activations, on 40 and 80 GB: the fewest GPUs that hold them
    are a multiple of one node of each type, and hold them."""
    training = {"sequence_length": 4096, "activation_checkpointing": "full", "micro_batch_size": 2}
    found = least_gpus(
        experiment(
            model="llama-2-13b", cluster={"extends": "dgx-h100", "nodes": TWO_SIZES}, training=training
        )
    )
    assert found is not None
    assert found % 16 == 0
    enough = {"extends": "dgx-h100", "nodes": [{**node, "count": found // 16} for node in TWO_SIZES]}
    job = resolve(experiment(model="llama-2-13b", cluster=enough, training=training))
    assert fits(job, make_plan(job))


@pytest.mark.parametrize("key", ["gpu.power_limit", "cluster.nic.per_node", "cluster.host.cores"])
def test_changes_that_no_type_of_nodes_takes_are_refused(key: str, tmp_path: Path) -> None:
    path = tmp_path / "both.toml"
    path.write_text(
        'schema = 1\nextends = "dgx-h100"\n[[nodes]]\nlike = "dgx-h100"\n[[nodes]]\nlike = "dgx-a100-80gb"\n'
    )
    given = {"model": TWO_LAYERS, "cluster": str(path)}
    build_experiment(given, {}, origin="test")
    table = key.removeprefix("cluster.").split(".")[0]
    with pytest.raises(
        InputError, match=f"{table}: would change nothing, each type under `nodes` has its own"
    ):
        resolve(build_experiment(given, {key: "500 W" if table == "gpu" else 4}, origin="test"))


def test_a_type_of_a_gpu_alone_takes_the_clusters_cards() -> None:
    nodes = [{"gpu": "h100-sxm-80gb"}, {"like": "dgx-a100-80gb"}]
    cluster = load_cluster({"extends": "dgx-h100", "nic": {"per_node": 4}, "nodes": nodes})
    assert [node.nic.per_node for node in cluster.nodes] == [4, load_cluster("dgx-a100-80gb").nic.per_node]
