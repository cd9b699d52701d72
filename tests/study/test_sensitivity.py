"""Which numbers a step depends on, and what would have to be true for a target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.browser import as_plotly, check_page, in_browser
from tests.expect import about
from zsim.api import simulate
from zsim.engine.simulate import simulate_job
from zsim.errors import InputError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.gpu import select_attention_variant
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.study.search import least_factor
from zsim.study.sensitivity.result import (
    SensitivityResult,
    sensitivity,
    tornado,
)
from zsim.study.sensitivity.sensitivity import (
    HARDWARE,
    Requirement,
    SensitivityBar,
    Variation,
    excluded_resources,
    hardware_variations,
    memory_to_fit,
    parse_target,
    requirements,
    software_numbers,
)

H100 = load_cluster("dgx-h100")
CPU_OFFLOAD = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1,
}  # fmt: skip


def llama(**changes: Any) -> Experiment:
    given = {
        "model": "llama-3.2-1b", "cluster": "dgx-h100", "gpus": 8, "training": {"sequence_length": 2048},
        **changes,
    }  # fmt: skip
    return Experiment(**given)


# -- knobs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HARDWARE)
@pytest.mark.parametrize("cluster", ["dgx-h100", "dgx-a100-80gb", "cpu-gloo", "mi300x-x8", "dgx-2"])
def test_every_knob_sets_what_it_scales(name: str, cluster: str) -> None:
    """Set over the file and scaled in memory, the cluster's numbers are the same."""
    knob, before = HARDWARE[name], load_cluster(cluster)
    if not knob.amount(before):
        assert knob.overrides(before, 0.8) == {}
        return
    changes = {key.removeprefix("cluster."): value for key, value in knob.overrides(before, 0.8).items()}
    assert changes
    experiment = change_experiment(
        llama(cluster=cluster), {f"cluster.{key}": value for key, value in changes.items()}
    )
    scaled = knob.scale_cluster(before, 0.8)
    assert knob.amount(load_cluster(experiment.cluster)) == pytest.approx(knob.amount(scaled))


def test_fractions_stop_at_one_and_excess_is_what_is_above_one() -> None:
    """0.95 of the card's bandwidth can be no 1.14; a slowdown of 1.2 is 20 % of excess, half of it 10 %."""
    assert HARDWARE["network efficiency"].overrides(H100, 1.2) == {"cluster.nic.efficiency": 1.0}
    excess = HARDWARE["slowdown beside collectives"].overrides(H100, 0.5)
    assert excess == {"cluster.gpu.interference.compute_slowdown": pytest.approx(1.1)}


def test_scaled_fractions_stop_at_one_and_scaled_slowdowns_above_it() -> None:
    """However much more of 0.95 is 1, and of a slowdown by 20 % a thousandth less is 1.0002."""
    assert HARDWARE["network efficiency"].scale_cluster(H100, 1000.0).nic.efficiency == 1.0
    least = HARDWARE["slowdown beside collectives"].scale_cluster(H100, 0.001)
    assert least.gpu.interference.compute_slowdown == pytest.approx(1.0002)


def test_kernels_for_narrow_heads_are_scaled_with_the_ones_for_wide_heads() -> None:
    gpu = select_attention_variant(load_cluster("dgx-a100-80gb").gpu, "flash1")
    before = load_cluster("dgx-a100-80gb").model_copy(update={"gpu": gpu})
    after = HARDWARE["attention's efficiency"].scale_cluster(before, 1.1).gpu.attention
    for head_dim in (64, 128):
        for is_backward in (False, True):
            was = gpu.attention.fraction(head_dim, is_backward=is_backward)
            assert after.fraction(head_dim, is_backward=is_backward) == pytest.approx(1.1 * was)


def test_quantities_are_set_with_their_units() -> None:
    """400 Gb/s are 50 GB/s, a fifth less 40."""
    knob = HARDWARE["network bandwidth"]
    assert knob.overrides(H100, 0.8) == {"cluster.nic.bandwidth": "40000000000.0 B/s"}
    assert knob.amount(H100) == 400.0


def test_faster_host_memory_is_what_the_same_key_of_a_run_is() -> None:
    """The CPU's rates are fractions of the memory's, and stay so."""
    knob = HARDWARE["host memory bandwidth"]
    faster = knob.scale_cluster(H100, 2.0)
    assert faster.host.memory_bandwidth == 2 * H100.host.memory_bandwidth
    assert faster.offload == H100.offload
    assert set(knob.overrides(H100, 2.0)) == {"cluster.host.memory_bandwidth"}


def test_the_sizes_of_a_stage_are_its_own() -> None:
    names = {stage: set(software_numbers(resolve(llama(strategy={"stage": stage})))) for stage in (2, 3)}
    assert names[2] == {"reduce_bucket_size", "allgather_bucket_size"}
    assert "stage3_prefetch_bucket_size" in names[3]
    assert set(software_numbers(resolve(llama(strategy={"kind": "ddp"})))) == {"bucket_cap_mb"}
    overlapped = {"kind": "megatron", "overlap_grad_reduce": True}
    assert software_numbers(resolve(llama(strategy=overlapped))) == {
        "bucket_size": ("strategy.bucket_size", 40_000_000.0, True)
    }
    assert not software_numbers(resolve(llama(strategy={"kind": "megatron"})))
    assert software_numbers(resolve(llama())) == {}


def test_a_stated_spread_is_taken_instead_of_the_default() -> None:
    """NVLink's efficiency of 0.81 was measured as 0.803 to 0.822; the slowdown of 1.2 is 1.14 to 1.32."""
    turns = {turn.name: turn for turn in hardware_variations(H100, 0.2)}
    link, slowdown = turns["NVLink efficiency"], turns["slowdown beside collectives"]
    assert (link.is_spread_stated, link.low, link.high) == (True, about(0.803 / 0.81), about(0.822 / 0.81))
    assert (slowdown.low, slowdown.high) == (about(0.7), about(1.6))
    assert (turns["HBM bandwidth"].is_spread_stated, turns["HBM bandwidth"].low) == (False, 0.8)
    assert turns["network efficiency"].high == pytest.approx(1 / 0.95)


def test_a_changed_number_loses_the_spread_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    origin = 'source = "made up for a test"\nevidence = "assumed"'
    path.write_text(f'schema = 1\nextends = "dgx-h100"\n[node_link]\n{origin}\nefficiency = 0.5\n')
    assert load_cluster(path).node_link.spread == {}
    assert H100.node_link.spread == {"efficiency": (0.803, 0.822)}


# -- the tornado -----------------------------------------------------------------------------------------


def test_numbers_come_in_the_order_in_which_they_matter(tmp_path: Path) -> None:
    """One GPU computes and sends nothing: the network has no effect, faster memory helps."""
    experiment = llama(gpus=1, training={"sequence_length": 512, "micro_batch_size": 8})
    found = sensitivity(experiment, cache=tmp_path, jobs=1)
    swings = [bar.swing(found.step_seconds) for bar in found.bars]
    assert swings == sorted(swings, reverse=True)
    assert found.step_seconds == simulate_job(resolve(experiment)).trace.step_seconds
    by_name = {bar.variation.name: bar for bar in found.bars}
    memory, network = by_name["HBM bandwidth"], by_name["network bandwidth"]
    assert memory.low_seconds is not None
    assert memory.high_seconds is not None
    assert memory.low_seconds > found.step_seconds > memory.high_seconds
    assert network.swing(found.step_seconds) == 0.0
    assert all(bar.error is None for bar in found.bars)


def test_a_bar_is_repeated_by_what_it_says(tmp_path: Path) -> None:
    experiment = llama(strategy={"kind": "deepspeed", "config": CPU_OFFLOAD})
    found = sensitivity(experiment, cache=tmp_path, jobs=1)
    bar = next(bar for bar in found.bars if bar.variation.name == "CPU optimizer")
    assert bar.variation.overrides[0]["cluster.offload.optimizer_fraction"] == pytest.approx(0.8 * 0.359)
    again = simulate_job(
        resolve(change_experiment(experiment, bar.variation.overrides[0]))
    ).trace.step_seconds
    assert again == bar.low_seconds
    assert again > found.step_seconds


@pytest.mark.parametrize("spread", [0.0, 1.0, -0.1])
def test_a_spread_is_a_fraction(spread: float) -> None:
    with pytest.raises(InputError, match=r"--spread: found .* expected a fraction between 0 and 1"):
        sensitivity(llama(), spread=spread)


# -- targets ---------------------------------------------------------------------------------------------


def test_the_search_finds_the_least_that_is_enough() -> None:
    assert least_factor(lambda factor: factor * 8 >= 19, 8) * 8 == 19
    assert 2.345 <= least_factor(lambda factor: factor >= 2.345) <= 2.345 * 1.011


def test_a_target_means_a_step() -> None:
    """2,048 tokens per GPU: 4,096 tokens/s/GPU are half a second; an MFU of the step's own is the step."""
    job = resolve(llama())
    assert parse_target("step_seconds=2.5", job).step_seconds == 2.5
    assert parse_target("tokens_per_second_per_gpu=4096", job).step_seconds == 0.5
    half = parse_target("mfu=0.25", job).step_seconds
    assert parse_target("mfu_fraction=0.5", job).step_seconds == pytest.approx(half / 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("speed=3", r"--target speed=3: expected one of step_seconds="),
        ("step_second=3", r"did you mean 'step_seconds'"),
        ("step_seconds=fast", r"found 'fast', expected a number above 0"),
        ("step_seconds", r"expected a number above 0"),
        ("mfu=1.5", r"expected a fraction of the GPU's peak below 1"),
    ],
)
def test_targets_that_mean_nothing_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_target(text, resolve(llama()))


def test_what_is_needed_reaches_the_target_and_a_little_less_does_not() -> None:
    """CPU-Adam stalls the step: a faster CPU takes a fifth off, the network does not."""
    experiment = llama(strategy={"kind": "deepspeed", "config": CPU_OFFLOAD})
    job = resolve(experiment)
    now = simulate_job(job).trace.step_seconds
    limit = 0.8 * now
    names = ["CPU optimizer", "network bandwidth"]
    cpu, network = requirements(experiment, f"step_seconds={limit}", names)
    assert cpu.needed is not None
    assert network.needed is None
    assert network.best_seconds == pytest.approx(now)
    factor = cpu.needed / cpu.available
    for times, is_enough in ((factor, True), (0.98 * factor, False)):
        varied = replace(job, cluster=HARDWARE["CPU optimizer"].scale_cluster(job.cluster, times))
        assert (simulate_job(varied).trace.step_seconds <= limit) == is_enough


def test_latencies_are_asked_for_the_most_that_is_allowed() -> None:
    """GPT-2 on one sequence waits for its host."""
    experiment = llama(model="gpt2", training={"sequence_length": 128}, strategy={"stage": 3})
    now = simulate_job(resolve(experiment)).trace.step_seconds
    (code,) = requirements(experiment, f"step_seconds={0.8 * now}", ["frameworks' host code"])
    assert code.needed is not None
    assert code.needed < code.available
    assert "at most" in code.sentence()


def test_what_is_there_may_be_enough() -> None:
    (need,) = requirements(llama(), "step_seconds=1000", ["HBM bandwidth"])
    assert need.sentence() == "HBM bandwidth: 3350 GB/s are enough"


def test_a_faster_peak_is_no_way_to_a_higher_mfu() -> None:
    """MFU is of the peak of the GPU that runs: with twice the peak a step is shorter and its MFU lower, so
    the peak is left out of a target of MFU, with why, and stays in one of seconds."""
    experiment = llama(training={"sequence_length": 2048, "compile": True})  # the GPU is the limit
    faster = change_experiment(experiment, HARDWARE["peak arithmetic"].overrides(H100, 2.0))
    before, after = simulate(experiment).report, simulate(faster).report
    assert before.mfu_fraction is not None
    assert after.mfu_fraction is not None
    assert after.step_seconds < before.step_seconds
    assert after.mfu_fraction < before.mfu_fraction
    names = [need.name for need in requirements(experiment, f"mfu={before.mfu_fraction / 2}")]
    assert "peak arithmetic" not in names
    assert excluded_resources(parse_target("mfu=0.5", resolve(experiment))) == {
        "peak arithmetic": "an MFU is a fraction of it, so more of it lowers the MFU"
    }
    with pytest.raises(InputError, match="--resource peak arithmetic: an MFU is a fraction of it"):
        requirements(experiment, "mfu=0.5", ["peak arithmetic"])
    assert excluded_resources(parse_target("step_seconds=1", resolve(experiment))) == {}
    (need,) = requirements(experiment, "step_seconds=1000", ["peak arithmetic"])
    assert need.needed == need.available


def test_an_mfu_that_is_reached_is_that_of_the_changed_machine() -> None:
    """Better matrix products raise the MFU by the same peak; a little less of them does not reach it."""
    experiment = llama(training={"sequence_length": 2048, "micro_batch_size": 4})
    now = simulate(experiment).report.mfu_fraction
    assert now is not None
    target = 1.1 * now
    (need,) = requirements(experiment, f"mfu={target}", ["matrix products' efficiency"])
    assert need.needed is not None
    assert need.available < need.needed < 1
    for times, is_enough in ((1.0001, True), (0.98, False)):
        changes = HARDWARE[need.name].overrides(H100, times * need.needed / need.available)
        mfu = simulate(change_experiment(experiment, changes)).report.mfu_fraction
        assert mfu is not None
        assert (mfu >= target) == is_enough


def test_efficiencies_are_asked_for_no_more_than_one() -> None:
    """Not at 1 either: the step then is that of an efficiency of 1, and says so."""
    experiment = llama()
    (need,) = requirements(experiment, "step_seconds=1e-6", ["matrix products' efficiency"])
    assert (need.needed, need.bound) == (None, 1.0)
    perfect = change_experiment(experiment, HARDWARE[need.name].overrides(H100, 1000.0))
    assert need.best_seconds == simulate_job(resolve(perfect)).trace.step_seconds
    assert "not by itself; at 1 a step takes" in need.sentence()


def test_every_number_of_the_tornado_is_asked_about() -> None:
    asked = {need.name for need in requirements(llama(), "step_seconds=1000")}
    assert asked == {turn.name for turn in hardware_variations(H100, 0.2)}


def test_an_unknown_resource_is_named() -> None:
    with pytest.raises(InputError, match=r"--resource nic: expected one of"):
        requirements(llama(), "step_seconds=1", ["nic"])


def test_the_memory_that_a_job_needs_comes_from_its_plan() -> None:
    assert "are enough" in memory_to_fit(llama())
    said = memory_to_fit(llama(model="llama-3-8b", gpus=1, strategy={"kind": "ddp"}))
    assert said.startswith("GPU memory: at least ")


# -- pages -----------------------------------------------------------------------------------------------


NEEDS = [Requirement("HBM", "GB/s", 3.0, 4.5, 5.0), Requirement("card", "GB/s", 3.0, None, 9.9)]


def by_hand() -> SensitivityResult:
    """A step of 10 s; memory takes it to 12 and 9, the card to 10.5 and 10, the drives nowhere."""
    changes = ({"cluster.x": "1 B/s"}, {"cluster.x": "2 B/s"})
    turns = [
        Variation(name, "hardware", 3.0, "GB/s", 0.8, 1.2, changes, False)
        for name in ("HBM", "card", "drives")
    ]
    ends = [(12.0, 9.0, None), (10.5, 10.0, None), (10.0, 10.0, None)]
    return SensitivityResult(
        "by hand", 10.0, 0.2, tuple(SensitivityBar(t, *e) for t, e in zip(turns, ends, strict=True)),
        requirements=NEEDS, target="step_seconds=8",
    )  # fmt: skip


def test_the_tornado_shows_what_has_an_effect() -> None:
    down, up = as_plotly(tornado(by_hand())).data
    assert list(down.y) == ["HBM", "card"]
    assert list(down.x) == pytest.approx([20.0, 5.0])
    assert list(up.x) == pytest.approx([-10.0, 0.0])


def test_the_json_has_the_bars_and_the_needs() -> None:
    content = json.loads(json.dumps(by_hand().to_dict()))
    assert content["numbers"][0]["low_step_seconds"] == 12.0
    assert content["numbers"][0]["low_settings"] == {"cluster.x": "1 B/s"}
    assert [need["needed"] for need in content["requirements"]] == [4.5, None]


def test_what_is_printed_fits_80_columns() -> None:
    """Also where a long name stands beside a long unit: what it is per gives way."""
    found = by_hand()
    name = "stage3_param_persistence_threshold"
    turn = replace(found.bars[0].variation, name=name, unit="GB/s read per drive", value=12_345.6)
    refused = SensitivityBar(
        found.bars[2].variation, None, None, "cluster.x: found 1, expected " + "more " * 20
    )
    needs = [*NEEDS, Requirement("network efficiency", "", 0.95, None, 9.5, 1.0)]
    left_out = {"peak arithmetic": "a reason of many words " * 5}
    bars = (SensitivityBar(turn, 25.0, 9.0, None), found.bars[1], refused)
    text = str(replace(found, bars=bars, requirements=needs, target="mfu=0.5", left_out=left_out))
    assert max(map(len, text.splitlines())) <= 80
    assert f"{name}  12,345.6 GB/s read " in text
    assert "card  " in text
    assert "drives: cluster.x: found 1, expected more" in text
    assert "HBM: at least 4.5 GB/s instead of 3 (1.50 times)" in text
    assert "card (9.900 s), network efficiency at 1 (9.500 s)" in " ".join(text.split())
    assert "peak arithmetic: left out; a reason of many words" in text


@in_browser
def test_the_page_is_alive(tmp_path: Path) -> None:
    dom = check_page(by_hand().page(), ["tornado"], tmp_path)
    assert "10.000 s per step; most depends on HBM, card." in dom
    assert "What would have to be true for step_seconds=8" in dom
    assert "cluster.x" in dom
