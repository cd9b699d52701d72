"""What would hide offloading, found by simulation; and what the report says of it."""

from __future__ import annotations

from typing import Any

import pytest

from zsim import Experiment
from zsim.errors import InputError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.load import change_experiment
from zsim.study.needs import Need, needs, offload_need
from zsim.study.search import least_factor, simulate
from zsim.study.sensitivity.sensitivity import HARDWARE
from zsim.units import format_seconds

NVME = {"device": "nvme", "nvme_path": "/nvme"}


def experiment_of(zero: dict[str, Any], **keys: Any) -> Experiment:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **zero}}
    return Experiment(
        model="gpt2", cluster="dgx-h100", gpus=4, training={"sequence_length": 1024, "micro_batch_size": 1},
        strategy={"kind": "deepspeed", "config": config}, **keys,
    )  # fmt: skip


def llama_on_host(threads_per_rank: int = 14) -> Experiment:
    """8 billion parameters on eight H100s, all that they keep on the host, with all of its 112 cores."""
    experiment = Experiment(
        model="llama-3-8b", cluster="dgx-h100", nodes=1,
        strategy={"kind": "fsdp2", "cpu_offload": True},
    )  # fmt: skip
    return change_experiment(experiment, {"cluster.offload.threads_per_rank": threads_per_rank})


def test_the_search_finds_the_least_factor() -> None:
    """Of eighths: 19 of 8 is enough, 18 is not; of anything: 2.345 to 1 %."""
    assert least_factor(lambda factor: factor * 8 >= 19, 8) * 8 == 19
    assert 2.345 <= least_factor(lambda factor: factor >= 2.345, None) <= 2.345 * 1.011


def test_one_drive_less_than_needed_does_not_hide_the_drives() -> None:
    need = offload_need(experiment_of({"offload_optimizer": NVME}), "drives")
    assert need.needed == round(need.needed) > need.available
    assert need.step_seconds > need.best_step_seconds
    assert need.sentence().startswith(f"drives: up to {need.needed:g} drives instead of {need.available:g} ")


def test_a_resource_that_does_not_hide_the_rest_says_what_is_left() -> None:
    """With CPUs as fast as they help, host memory still holds up the step,
    by as much as the report of that machine says."""
    experiment = llama_on_host()
    need = offload_need(experiment, "cpu")
    faster = HARDWARE["CPU optimizer"].overrides(load_cluster("dgx-h100"), need.needed / need.available)
    report = simulate(change_experiment(experiment, faster)).report
    assert report.offload is not None
    left = sum(report.offload.stall_seconds.values())
    assert left > 0.3 * report.step_seconds
    assert not need.is_hidden
    assert report.step_seconds == pytest.approx(need.best_step_seconds)
    assert sum(need.stall_seconds.values()) == pytest.approx(left)
    assert "would shorten the step" in need.sentence()
    assert f"{format_seconds(left)} ({left / report.step_seconds:.0%}".replace("%", " %") in need.sentence()
    assert "stalls of offloading (CPU step 4" in need.sentence()


def test_what_is_as_good_as_plenty_but_leaves_stalls_is_not_called_enough() -> None:
    experiment = llama_on_host()
    need = offload_need(experiment, "pcie", tolerance=0.05)
    assert need.is_enough
    assert not need.is_hidden
    assert need.sentence().startswith("pcie: more than 63 GB/s per GPU does not help by itself: 1.590 s")


def test_faster_memory_is_a_faster_update_on_the_cpu() -> None:
    """What `needs` says of it is what a run with it takes."""
    need = offload_need(llama_on_host(), "host memory")
    faster = {"cluster.host.memory_bandwidth": f"{need.needed} GB/s"}
    report = simulate(change_experiment(llama_on_host(), faster)).report
    assert report.step_seconds == pytest.approx(need.best_step_seconds)
    assert need.needed > 3 * need.available
    assert need.best_step_seconds < 0.6 * need.step_seconds


def test_few_threads_are_what_a_faster_cpu_is_measured_against() -> None:
    """One thread of each of eight ranks: 8 x 21 of the 220.4 GB/s that all cores reach. As fast a CPU as all
    cores need helps as much; faster memory does not help threads that cannot use what there is."""
    few, all_cores = (offload_need(llama_on_host(threads), "cpu") for threads in (1, 14))
    assert few.available == pytest.approx(8 * 21)
    assert all_cores.available == pytest.approx(614 * 0.359, rel=1e-4)
    assert few.step_seconds > 1.1 * all_cores.step_seconds
    assert few.needed == pytest.approx(all_cores.needed, rel=0.02)
    assert few.best_step_seconds == pytest.approx(all_cores.best_step_seconds, rel=0.01)
    memory = offload_need(llama_on_host(1), "host memory")
    assert memory.is_enough
    assert not memory.is_hidden


def needed(amount: float, stalls: dict[str, float], *, is_hidden: bool) -> Need:
    """A step of 10 s, of 4 s with so many drives instead of 8."""
    return Need("drives", "drives", 8.0, amount, 10.0, 4.0, stalls, is_hidden)


def test_the_words_follow_from_what_is_left_to_wait_for() -> None:
    """1 s of 4 s is 25 %, of 10 s 10 %; a hundredth of the stalls is not named."""
    assert needed(8, {}, is_hidden=True).sentence() == "drives: 8 drives are enough"
    assert needed(19, {"PCIe": 0.01}, is_hidden=True).sentence() == (
        "drives: 19 drives instead of 8 would hide the offloading: 4.000 s instead of 10.000 s per step"
    )
    stalls = {"PCIe": 0.25, "CPU step": 0.745, "DRAM": 0.005}
    left = "1.000 s ({} %) are still stalls of offloading (CPU step 745.00 ms, PCIe 250.00 ms)"
    assert needed(19, stalls, is_hidden=False).sentence() == (
        "drives: up to 19 drives instead of 8 would shorten the step: 4.000 s "
        "instead of 10.000 s, of which " + left.format(25)
    )
    assert needed(8, stalls, is_hidden=False).sentence() == (
        "drives: more than 8 drives does not help by itself: 10.000 s per step, of which " + left.format(10)
    )


def test_drives_are_asked_about_where_they_are_used() -> None:
    names = [need.resource for need in needs(experiment_of({"offload_param": {"device": "cpu"}}))]
    assert names == ["pcie", "host memory", "cpu"]


def test_questions_without_an_answer_are_errors() -> None:
    with pytest.raises(InputError, match="nothing is offloaded"):
        needs(experiment_of({}))
    with pytest.raises(InputError, match=r"found 'drive', expected one of drives.*did you mean 'drives'"):
        offload_need(experiment_of({"offload_optimizer": NVME}), "drive")
    with pytest.raises(InputError, match="no drives to ask about"):
        offload_need(
            experiment_of({"offload_optimizer": NVME}).model_copy(update={"cluster": "cpu-gloo"}), "drives"
        )


PLACEMENTS: list[dict[str, Any]] = [
    {"offload_optimizer": {"device": "cpu"}},
    {"offload_optimizer": {"device": "cpu", "pin_memory": False}, "offload_param": {"device": "cpu"}},
    {"offload_optimizer": NVME, "offload_param": {"device": "cpu"}},
    {"offload_optimizer": {**NVME, "pipeline_read": True, "pipeline_write": True, "buffer_count": 12},
     "offload_param": {**NVME, "max_in_cpu": 0, "buffer_count": 60}, "sub_group_size": 10**7},
]  # fmt: skip


@pytest.mark.parametrize("zero", PLACEMENTS)
def test_the_causes_of_the_stall_add_up_to_it_and_tiers_are_never_overfull(zero: dict[str, Any]) -> None:
    report = simulate(experiment_of(zero)).report
    section = report.offload
    assert section is not None
    assert sum(section.stall_seconds.values()) == pytest.approx(report.breakdown.seconds["offload_stall"])
    assert all(0 <= tier.utilisation_fraction <= 1 + 1e-9 for tier in section.tiers)
    assert report.to_dict()["offload"]["moved_bytes"]["d2h"] > 0
    assert report.to_dict()["evidence"]["offload"] in ("measured", "calibrated", "data sheet", "assumed")


@pytest.mark.parametrize("zero", PLACEMENTS)
def test_a_whole_step_folds(zero: dict[str, Any]) -> None:
    experiment = experiment_of(zero)
    folded, unfolded = simulate(experiment), simulate(experiment, unfold=True)
    assert folded.report.step_seconds == pytest.approx(unfolded.report.step_seconds, rel=1e-9)
    assert folded.report.offload is not None
    assert unfolded.report.offload is not None
    for row, other in zip(folded.report.offload.tiers, unfolded.report.offload.tiers, strict=True):
        assert row.utilisation_fraction == pytest.approx(other.utilisation_fraction, rel=1e-9)


def test_a_step_without_offloading_says_nothing_of_it() -> None:
    report = simulate(experiment_of({})).report
    assert report.offload is None
    assert report.to_dict()["offload"] is None
    assert "offload" not in report.evidence


def test_every_tier_has_a_track_of_its_own() -> None:
    trace = simulate(experiment_of(PLACEMENTS[-1])).trace
    streams = {info.stream for info in trace.infos}
    assert {"h2d", "d2h", "cpu", "nvme_read", "nvme_write"} <= streams


def test_host_memory_that_does_not_suffice_is_named_with_what_is_missing() -> None:
    """70B parameters, 22 bytes each on the two tiers of one DGX-2: the host's 1.5 TB are too little."""
    cpu = {"device": "cpu"}
    config = {
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu},
    }
    experiment = Experiment(
        model={"model_type": "gpt2", "n_embd": 8192, "n_layer": 124, "n_head": 64, "n_positions": 1024,
               "vocab_size": 50257},
        cluster="dgx-2", nodes=1,
        training={"sequence_length": 1024, "micro_batch_size": 1, "activation_checkpointing": "full"},
        strategy={"kind": "deepspeed", "config": config},
    )  # fmt: skip
    finding = simulate(experiment).report.out_of_memory
    assert finding is not None
    assert finding.pool == "host"
    assert finding.peak_missing_bytes == pytest.approx(20 * 100.3e9 - 1.5e12, rel=0.02)
    assert finding.least_gpus == 32
