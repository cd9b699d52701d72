"""Host costs: every event a plan may name has one, with its origin."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.cost.rates.host_calls import host_seconds, load_host_costs, retry_seconds
from zsim.errors import InputError
from zsim.specs.cluster.cluster import HostDevice

_EVENTS = {
    "module_call",
    "autograd_node",
    "collective_call",
    "ddp_bucket",
    "fsdp1_forward",
    "fsdp1_unshard",
    "fsdp1_reduce",
    "fsdp1_view",
    "fsdp1_unit_views",
    "fsdp1_flat_view",
    "fsdp2_unshard",
    "fsdp2_reduce",
    "deepspeed_fetch",
    "deepspeed_release",
    "deepspeed_fetch_before_0_19_1",
    "deepspeed_release_before_0_19_1",
    "deepspeed_gradient_hook",
    "deepspeed_reduce",
    "optimizer_step",
    "step",
    "dtensor_in_list",
    "dtensor_update",
}


def host(factor: float = 1.0) -> HostDevice:
    return HostDevice.model_validate(
        {
            "source": "made up for this test",
            "evidence": "assumed",
            "cores": 8,
            "memory": "64 GB",
            "memory_bandwidth": "100 GB/s",
            "seconds_per_launch": "5 us",
            "overhead_factor": factor,
        }
    )


def test_every_event_that_plans_name_has_a_cost_a_source_and_a_grade() -> None:
    costs = load_host_costs()
    assert set(costs.seconds) >= _EVENTS
    for event in costs.seconds:
        assert costs.seconds[event] > 0
        assert len(costs.sources[event]) > 20
        assert costs.evidence[event] in ("measured", "calibrated", "data sheet", "assumed")


def test_an_op_costs_its_event_times_the_factor_plus_its_launches() -> None:
    """fsdp2_unshard at 1.5 times the reference CPU and 4 launches of 5 us, which are not scaled."""
    costs = load_host_costs()
    expected = 1.5 * costs.seconds_on_gpu["fsdp2_unshard"] + 20e-6
    assert costs.seconds_on_gpu["fsdp2_unshard"] > costs.seconds["fsdp2_unshard"]
    assert host_seconds("fsdp2_unshard", 1, 4, host(1.5), costs) == pytest.approx(expected)


@pytest.mark.parametrize("event", ["deepspeed_fetch", "deepspeed_release"])
def test_hooks_of_deepspeed_before_0_19_1_take_two_thirds_of_the_time(event: str) -> None:
    """A leaf module forward and backward: 236 + 130 us with 0.9.3, 321 + 221 with 0.19.8."""
    costs = load_host_costs()
    for seconds in (costs.seconds, costs.seconds_on_gpu):
        assert seconds[f"{event}_before_0_19_1"] / seconds[event] == pytest.approx(366 / 542, rel=0.02)


def test_what_torch_takes_for_every_kernel_is_paid_by_launch_and_scaled() -> None:
    costs = load_host_costs()
    expected = 1.5 * (costs.seconds["eager_call"] + 4 * costs.seconds_per_launch["eager_call"]) + 20e-6
    assert host_seconds("eager_call", 1, 4, host(1.5), costs) == pytest.approx(expected)


def test_a_rank_on_a_cpu_pays_its_events_as_they_were_timed_on_cpus() -> None:
    """Its kernels' own seconds hold their dispatch: a launch costs nothing."""
    costs, free = load_host_costs(), host(1.5).model_copy(update={"seconds_per_launch": 0.0})
    for event in ("fsdp2_unshard", "eager_call"):
        assert host_seconds(event, 1, 4, free, costs) == pytest.approx(1.5 * costs.seconds[event])


def test_an_event_that_happens_often_is_paid_as_often() -> None:
    costs = load_host_costs()
    expected = 291 * 1.5 * costs.seconds["dtensor_in_list"]
    assert host_seconds("dtensor_in_list", 291, 0, host(1.5), costs) == pytest.approx(expected)


@pytest.mark.parametrize(("ranks", "expected"), [(1, 0.02), (2, 0.315), (8, 0.57075), (1024, 0.57075)])
def test_a_retry_stalls_many_ranks_no_longer_than_the_few_it_was_measured_on(
    ranks: int, expected: float
) -> None:
    """20 ms of a rank alone; 0.21 s times 1 + 1/2, and times 1 + ... + 1/8 on 8 ranks and on more."""
    assert retry_seconds(ranks, load_host_costs()) == pytest.approx(expected)


def test_an_op_without_an_event_costs_its_launches() -> None:
    assert host_seconds(None, 1, 3, host(), load_host_costs()) == pytest.approx(15e-6)


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('schema = 1\n[step]\nseconds = 3\nsource = "no idea at all"\nevidence = "assumed"\n')
    with pytest.raises(InputError, match=r"^mine.toml: events.step.seconds: '3' has no unit"):
        load_host_costs(path)
