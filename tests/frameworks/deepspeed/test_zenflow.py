"""ZenFlow: what is selected, sent, kept, and when the CPU works.

GPT-2 has N = 124,439,808 parameters, and topk_ratio 0.1 rounds columns down. A block's matrices (in x out)
are 768 x 2304, 768 x 768, 768 x 3072 and 3072 x 768: 230, 76, 307 and 76 columns. Its vectors are two norms
of 2 x 768 and biases of 2304, 768, 3072 and 768. Outside are 50,257 x 768 and 1,024 x 768, 76 columns each,
and a norm.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import pytest

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.fetch_trace import ZeroParameter
from zsim.frameworks.deepspeed.stage3.zenflow import selected_elements
from zsim.plan.checks import check_plan
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Copy, HostWork, Kernels, Op, Plan
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
    zero_init: bool = True,
    more: Any = None,
    gpus: int = GPUS,
    **zenflow: Any,
) -> zsim.Experiment:
    """GPT-2 on 4 A100, an interval of 4 iterations."""
    zenflow["offload"] = zenflow.pop("offload_states", False)
    block = {"topk_ratio": 0.1, "update_interval": 4, **zenflow}
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": overlap_comm, "zenflow": block, **(more or {})}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return zsim.Experiment(
        model="gpt2",
        cluster="dgx-a100-40gb",
        nodes=-(-gpus // 8),
        gpus=gpus,
        training={"sequence_length": 512, "micro_batch_size": 1, **(training or {})},
        strategy={
            "kind": "deepspeed", "version": version, "zero_init": zero_init,
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


def of_stage_3(**zenflow: Any) -> Plan:
    found = make_plan(resolve(experiment_of(stage=3, zero_init=False, **zenflow)))
    check_plan(found)
    return found


def test_stage_3_selects_whole_columns_of_a_shard() -> None:
    """A weight of 6 x 10 is stored as 10 columns of 6. Of four shards of 15 elements those at 0, 15, 30 and
    45 have columns 0 and 1, 3 and 4, 5 and 6, 8 and 9 whole: 8, of which 0.3 are 2, 12 elements for four
    ranks. 0.1 of them is none, so one is taken. A vector's shard is taken whole. Where 20 ranks have 3
    elements each, none has a column."""

    def parameter(shape: tuple[int, ...], ranks: int) -> ZeroParameter:
        numel = prod(shape)
        shard = -(-numel // ranks)
        return ZeroParameter("weight", shape, numel, shard, shard * ranks, is_persistent=False)

    assert selected_elements(parameter((6, 10), 4), 4, 0.3) == 3
    assert selected_elements(parameter((6, 10), 4), 4, 0.1) == 1
    assert selected_elements(parameter((10,), 4), 4, 0.1) == 3
    assert selected_elements(parameter((6, 10), 20), 20, 0.3) == 0


def test_stage_3_sends_nothing_for_the_selection() -> None:
    """Gathers and reductions are those of ZeRO-Offload, but for the persistent parameters: the vectors, which
    every iteration behind the first gathers again."""
    kinds = Counter(op.work.kind for op in of_stage_3().ops if isinstance(op.work, Collective))
    assert kinds["broadcast"] == 0

    def gathered(found: Plan) -> list[int]:
        """Bytes that each forward gathers."""
        sizes = [0]
        for op in found.ops:
            if op.phase == "forward" and isinstance(op.work, Collective):
                sizes[-1] += op.work.bytes
            if op.name == "end of backward":
                sizes.append(0)
        return sizes

    vectors = 2 * (12 * (2 * 1536 + 2304 + 768 + 3072 + 768) + 1536)
    found = of_stage_3(more={"stage3_param_persistence_threshold": 10_000})
    first, *others, rest = gathered(found)
    assert others == 3 * [first + vectors]
    assert rest == 0


def test_stage_3_keeps_the_selected_moments_of_its_shard_alone() -> None:
    """About a tenth of the weights and all of the vectors, cut over the ranks, 4 bytes an element. Columns
    that a shard's ends cut are left out."""
    moments = [
        m.bytes for m in of_stage_3().resident if m.category == "optimizer_states" and m.device == "gpu"
    ]
    assert len([size for size in moments if size]) == 1
    assert sum(moments) == pytest.approx(4 * SELECTED / GPUS, rel=0.03)


def test_stage_3_selects_nothing_of_frozen_weights() -> None:
    """A pair of LoRA on each of 12 products. Of 768 columns of 8 elements 76 are selected, of 8 columns of
    2304 one: 608 + 2304 = 2912 elements, a quarter of them on each rank.
    """
    found = of_stage_3(training={"lora": {"rank": 8, "targets": ["c_attn"]}})
    moments = [m.bytes for m in found.resident if m.category == "optimizer_states" and m.device == "gpu"]
    assert sum(moments) == 4 * 12 * 2912 // 4
    put = next(op for op in found.ops if op.name == "put kept weights back")
    assert isinstance(put.work, Kernels)
    assert sum(kernel.launches for kernel in put.work.kernels) == 12 * 2


def test_stage_3_copies_every_matrix_gradient_once_more_in_each_iteration() -> None:
    names = Counter(op.name for op in of_stage_3().ops)
    transposed = {name: count for name, count in names.items() if name.startswith("transpose gradient of")}
    assert set(transposed.values()) == {4}
    assert len(transposed) == 12 * 4 + 1 + 1  # of each block four matrices; the embeddings, the head tied


def test_stage_3_updates_late_or_from_the_start() -> None:
    """28 bytes of Adam for a rank's elements in the step, or before the first kernel."""
    late = [op for op in of_stage_3().ops if isinstance(op.work, HostWork) and "optimizer step" in op.name]
    assert [op.phase for op in late] == ["optimizer"]
    found = of_stage_3(overlap_step=True)
    first = next(op for op in found.ops if op.work is not None)
    assert first.name == "optimizer step"
    assert isinstance(first.work, HostWork)
    assert first.work.bytes == pytest.approx(28 * SHARD, rel=1e-3)
    host = sum(m.bytes for m in found.resident if m.device == "host")
    plain = sum(m.bytes for m in of_stage_3().resident if m.device == "host")
    assert host - plain == pytest.approx(16 * SHARD, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"stage": 3}, InputError, "strategy.zero_init: found true with ZenFlow at stage 3"),
        (
            {"stage": 3, "more": {"zero_hpz_partition_size": 2}},
            NotSimulatedError,
            "ZenFlow at stage 3 with hpZ",
        ),
        (
            {"stage": 3, "zero_init": False, "gpus": 1024},
            InputError,
            "no shard of .* has a whole column of 50,257",
        ),
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
