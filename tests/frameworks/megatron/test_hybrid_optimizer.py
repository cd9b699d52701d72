"""Megatron's optimizer on the CPU, in whole or in part.

Llama-3.2-1B on 8 GPUs with the distributed optimizer: n = 1,235,814,400 / 8 elements a rank (and padding).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.errors import InputError
from zsim.frameworks.megatron.hybrid_optimizer import split_tensors
from zsim.plan.ops import Copy, HostWork, Plan
from zsim.programs.megatron_lm.write import megatron_script
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve

NUMEL = 1_235_814_400 / 8


def plan_of(fraction: float | None = 1.0, **strategy: Any) -> Plan:
    return zsim.make_plan(experiment(fraction, **strategy))


def experiment(fraction: float | None = 1.0, **strategy: Any) -> zsim.Experiment:
    return zsim.Experiment(
        model="llama-3.2-1b",
        cluster="dgx-h100",
        training={"sequence_length": 1024, "precision": "bf16"},
        strategy={
            "kind": "megatron",
            "distributed_optimizer": True,
            "precision_aware_optimizer": True,
            "optimizer_offload_fraction": fraction,
            **strategy,
        },
    )


def resident(plan: Plan) -> Counter[tuple[str, str]]:
    levels: Counter[tuple[str, str]] = Counter()
    for memory in plan.program.resident:
        levels[memory.category, memory.device] += memory.bytes
    return levels


def crossed(plan: Plan) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for op in plan.ops:
        if isinstance(op.work, Copy):
            sizes[op.work.direction] += op.work.bytes
    return sizes


def test_tensors_go_to_the_cpu_in_order_until_they_have_the_fraction() -> None:
    """40 of 100 elements: the tensor that reaches it goes whole."""
    assert split_tensors([30, 20, 25, 25], 0.4) == ([30, 20], [25, 25])
    assert split_tensors([30, 20, 25, 25], 0.0) == ([], [30, 20, 25, 25])
    assert split_tensors([30, 20, 25, 25], 1.0) == ([30, 20, 25, 25], [])


def test_all_states_are_in_host_memory_and_gradients_and_masters_cross_in_fp32() -> None:
    """12 bytes of states and 4 of gradients an element on the host; 4 bytes go out and 4 come back."""
    plan = plan_of()
    levels = resident(plan)
    assert levels["optimizer_states", "host"] == pytest.approx(12 * NUMEL, rel=0.001)
    assert levels["gradients", "host"] == pytest.approx(4 * NUMEL, rel=0.001)
    assert levels["optimizer_states", "gpu"] == 0
    assert crossed(plan) == {
        "d2h": pytest.approx(4 * NUMEL, rel=0.001),
        "h2d": pytest.approx(4 * NUMEL, rel=0.001),
    }


def test_a_fraction_leaves_the_rest_on_the_gpu() -> None:
    """The embedding's 262,668,288 elements are on two ranks' shards, so that a half is not exact."""
    levels = resident(plan_of(0.5))
    host, gpu = levels["optimizer_states", "host"], levels["optimizer_states", "gpu"]
    assert host + gpu == pytest.approx(12 * NUMEL, rel=0.001)
    assert 0.5 <= host / (host + gpu) < 0.75
    assert resident(plan_of(0.0))["optimizer_states", "host"] == 0


def test_with_overlap_every_tensor_is_updated_by_itself_while_others_are_under_way() -> None:
    plan = plan_of(overlap_optimizer_offload=True)
    updates = [op for op in plan.ops if isinstance(op.work, HostWork)]
    copies = [op for op in plan.ops if isinstance(op.work, Copy)]
    assert len(updates) > 10
    assert {op.stream for op in copies} == {"gradients to host", "masters from host"}
    first = next(number for number, op in enumerate(plan.ops) if isinstance(op.work, HostWork))
    sent = [op for op in plan.ops[:first] if isinstance(op.work, Copy)]
    assert len(sent) == len(updates)
    assert len([op for op in plan_of().ops if isinstance(op.work, HostWork)]) == 1


def test_the_step_waits_for_the_cpu_less_with_overlap_and_with_a_part() -> None:
    def seconds(fraction: float, **strategy: Any) -> float:
        return zsim.simulate(experiment(fraction, **strategy)).report.step_seconds

    whole, part = seconds(1.0), seconds(0.25)
    assert seconds(1.0, overlap_optimizer_offload=True) < whole
    assert part < whole
    assert any("OMP_NUM_THREADS" in note for note in resolve(experiment()).notes)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"precision_aware_optimizer": False}, "only with the precision-aware optimizer"),
        ({"version": "0.11.0"}, "from '0.12.0' on"),
        ({"exp_avg_dtype": "bf16"}, "keeps fp32 states"),
    ],
)
def test_what_megatron_refuses_is_an_error(strategy: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"strategy.optimizer_offload_fraction: .*{message}"):
        plan_of(**strategy)


def test_overlap_without_an_optimizer_on_the_cpu_is_an_error() -> None:
    with pytest.raises(InputError, match="overlap_optimizer_offload: found true without"):
        plan_of(None, overlap_optimizer_offload=True)


def test_a_script_says_it_and_is_read_back(tmp_path: Path) -> None:
    """The default of the command line is everything."""
    job = resolve(experiment(0.5, overlap_optimizer_offload=True))
    script = megatron_script(job)
    assert "--optimizer-cpu-offload --optimizer-offload-fraction 0.5" in script
    for flags, fraction in (("", 0.5), ("whole", 1.0)):
        text = script.replace(" --optimizer-offload-fraction 0.5", "") if flags else script
        (tmp_path / "run.sh").write_text(text)
        data = {"model": "llama-3.2-1b", "cluster": "dgx-h100"}
        again = build_experiment(data, {"strategy.config": str(tmp_path / "run.sh")}, origin="test")
        assert again.strategy.optimizer_offload_fraction == fraction  # type: ignore[attr-defined]
        assert again.strategy.overlap_optimizer_offload  # type: ignore[attr-defined]
