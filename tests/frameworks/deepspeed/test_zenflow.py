"""ZenFlow at stages 1 and 2: what is selected, sent, kept, and when the CPU works.

GPT-2 has N = 124,439,808 parameters, and topk_ratio 0.1 rounds columns down. A block's matrices (in x out)
are 768 x 2304, 768 x 768, 768 x 3072 and 3072 x 768: 230, 76, 307 and 76 columns. Its vectors are two norms
of 2 x 768 and biases of 2304, 768, 3072 and 768. Outside are 50,257 x 768 and 1,024 x 768, 76 columns each,
and a norm.
"""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Copy, HostWork, Op
from zsim.specs.experiment.resolve import resolve

N = 124_439_808
BLOCK = 768 * (230 + 76 + 307) + 3072 * 76 + 2 * 1536 + 2304 + 768 + 3072 + 768
SELECTED = 12 * BLOCK + 76 * (50_257 + 1_024) + 1536
GPUS = 4
SHARD = N // GPUS


def experiment_of(
    *,
    stage: int = 2,
    version: str = "0.19.8",
    training: Any = None,
    offload: bool = True,
    overlap_comm: bool = True,
    **zenflow: Any,
) -> zsim.Experiment:
    """GPT-2 on 4 A100, an interval of 4 iterations."""
    zenflow["offload"] = zenflow.pop("offload_states", False)
    block = {"topk_ratio": 0.1, "update_interval": 4, **zenflow}
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": overlap_comm, "zenflow": block}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return zsim.Experiment(
        model="gpt2",
        cluster="dgx-a100-40gb",
        gpus=GPUS,
        training={"sequence_length": 512, "micro_batch_size": 1, **(training or {})},
        strategy={
            "kind": "deepspeed", "version": version,
            "config": {"bf16": {"enabled": True}, "zero_optimization": zero},
        },
    )  # fmt: skip


def ops_of(**zenflow: Any) -> tuple[Op, ...]:
    return tuple(make_plan(resolve(experiment_of(**zenflow))).programs[0].ops)


def copied(direction: str, **zenflow: Any) -> int:
    works = (op.work for op in ops_of(**zenflow))
    return sum(work.bytes for work in works if isinstance(work, Copy) and work.direction == direction)


def test_every_iteration_broadcasts_the_selected_part() -> None:
    """2 bytes an element, four times, less what is rounded down in a call."""
    sizes = [
        op.work.bytes for op in ops_of() if isinstance(op.work, Collective) and op.work.kind == "broadcast"
    ]
    assert 4 * 2 * SELECTED - 2 * len(sizes) <= sum(sizes) <= 4 * 2 * SELECTED


def test_stage_1_reduces_in_every_iteration_as_stage_2_does() -> None:
    """DeepSpeed 0.19.8 `reduce_ready_partitions_and_remove_grads`: `or self.zenflow`."""
    assert ops_of(stage=1) == ops_of(stage=2)


def test_an_interval_takes_the_place_of_accumulation() -> None:
    config = resolve(experiment_of()).strategy
    assert isinstance(config, DeepSpeedConfig)
    assert config.batch.gradient_accumulation_steps == 4
    assert config.batch.train_batch_size == 16
    assert any("an interval of 4 iterations, each of which updates 10%" in note for note in config.notes)


def test_moments_of_the_selected_part_are_on_every_gpu() -> None:
    """Two of 2 bytes an element; with `offload` in host memory. Masters and moments stay on the host."""

    def states(**zenflow: Any) -> tuple[int, int]:
        peaks = zsim.simulate(experiment_of(**zenflow)).report.to_dict()["peak_bytes"]
        return peaks["gpu"]["optimizer_states"], peaks["host"]["optimizer_states"]

    assert states() == (4 * SELECTED, 12 * N)
    assert states(offload_states=True) == (0, 12 * N + GPUS * 4 * SELECTED)
    assert states(overlap_step=True) == (4 * SELECTED, (12 + 8 + 4) * N)


def test_the_overlapped_update_runs_from_the_start_of_the_interval() -> None:
    """28 bytes of Adam and 8 of the snapshot before the first kernel; 6 of the cast at the end."""
    ops = ops_of(overlap_step=True)
    kinds = [(op.phase, op.work.bytes) for op in ops if isinstance(op.work, HostWork)]
    assert [size for _, size in kinds[:2]] == [28 * SHARD, 8 * SHARD]
    first = next(op for op in ops if op.work is not None)
    assert first.name == "optimizer step"
    assert 6 * SHARD in [size for _, size in kinds[2:]]
    late = [op.work.bytes for op in ops_of() if isinstance(op.work, HostWork) and op.phase == "optimizer"]
    assert 28 * SHARD in late


def test_iterations_sum_in_host_memory() -> None:
    """Down: four sums of 2 bytes and once fp32. Up: three sums and the weights, 2 bytes each."""
    assert copied("d2h") == pytest.approx((4 * 2 + 4) * SHARD, rel=1e-4)
    assert copied("h2d") == pytest.approx((3 * 2 + 2) * SHARD, rel=1e-4)
    moments = 4 * (4 * SELECTED)
    assert copied("h2d", offload_states=True) == pytest.approx(8 * SHARD + moments, rel=1e-4)


def test_an_iteration_is_faster_than_zero_offloads_step() -> None:
    plain = experiment_of()
    zero = dict(plain.strategy.config["zero_optimization"])  # type: ignore[attr-defined]
    del zero["zenflow"]
    strategy = {
        "kind": "deepspeed", "config": {"bf16": {"enabled": True}, "zero_optimization": zero}
    }  # fmt: skip
    offload = zsim.Experiment(**{**plain.model_dump(exclude_unset=True), "strategy": strategy})
    seconds = zsim.simulate(offload).trace.step_seconds
    sequential = zsim.simulate(plain).trace.step_seconds / 4
    overlapped = zsim.simulate(experiment_of(overlap_step=True)).trace.step_seconds / 4
    assert overlapped < sequential < seconds


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"stage": 3}, NotSimulatedError, "ZenFlow at stage 3, only at stages 1 and 2"),
        ({"stage": 1, "overlap_comm": False}, NotSimulatedError, "at stage 1 without overlap_comm"),
        ({"update_interval": None}, NotSimulatedError, "'auto'.*a number, such as 4, would do"),
        ({"version": "0.19.3"}, NotSimulatedError, "ZenFlow before 0.19.4"),
        ({"offload": False}, InputError, "needs zero_optimization.offload_optimizer with device 'cpu'"),
        ({"select_strategy": "step"}, InputError, "select_interval: missing"),
        ({"select_strategy": "step", "select_interval": 2}, InputError, "found 2, below update_interval 4"),
        ({"select_interval": 2}, InputError, "expected 'step' or 'epoch', or no interval"),
        ({"training": {"optimizer": "lion"}}, InputError, "AdamW and the rest with DeepSpeedCPUAdam"),
    ],
)
def test_refusals_name_the_way_out(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_plan(resolve(experiment_of(**change)))
