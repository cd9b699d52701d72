"""What would hide offloading, found by simulation; and what the report says of it."""

from __future__ import annotations

from typing import Any

import pytest

from zsim import Experiment
from zsim.api import simulate
from zsim.errors import InputError
from zsim.study.offload_needs import offload_need, offload_needs
from zsim.study.search import least_factor

NVME = {"device": "nvme", "nvme_path": "/nvme"}


def experiment_of(zero: dict[str, Any], **keys: Any) -> Experiment:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **zero}}
    return Experiment(
        model="gpt2", cluster="dgx-h100", gpus=4, training={"sequence_length": 1024, "micro_batch_size": 1},
        strategy={"kind": "deepspeed", "config": config}, **keys,
    )  # fmt: skip


def test_the_search_finds_theleast_factor() -> None:
    """Of eighths: 19 of 8 is enough, 18 is not; of anything: 2.345 to 1 %."""
    assert least_factor(lambda factor: factor * 8 >= 19, 8) * 8 == 19
    assert 2.345 <= least_factor(lambda factor: factor >= 2.345, None) <= 2.345 * 1.011


def test_one_drive_less_than_needed_does_not_hide_the_drives() -> None:
    need = offload_need(experiment_of({"offload_optimizer": NVME}), "drives")
    assert need.needed == round(need.needed) > need.available
    assert need.step_seconds > need.best_step_seconds
    assert f"{need.needed:g} drives instead of {need.available:g} would hide it" in need.sentence()


def test_what_is_enough_is_said_so() -> None:
    need = offload_need(experiment_of({"offload_param": {"device": "cpu"}}), "cpu")
    assert need.is_enough
    assert need.sentence().endswith("are enough")


def test_drives_are_asked_about_where_they_are_used() -> None:
    names = [need.resource for need in offload_needs(experiment_of({"offload_param": {"device": "cpu"}}))]
    assert names == ["pcie", "host memory", "cpu"]


def test_questions_without_an_answer_are_errors() -> None:
    with pytest.raises(InputError, match="nothing is offloaded"):
        offload_needs(experiment_of({}))
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
