"""zsim's plans against what PyTorch really did: `python -m validation.plan_check`.

The plan check has no clock and no tolerance: the same collectives, of the same kinds, sizes, types and
groups, in the same order, as the oracle's answers and the recorded runs have them. Memory is compared by
category, as a relative error: activations follow formulas there and the allocator's order here."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zsim
from validation.calls import Call, unfold
from validation.oracle.answer import Answer
from validation.oracle.case import Case
from zsim.plan.memory.peaks import plan_peaks
from zsim.plan.ops import Collective, Plan

TRACES = Path(__file__).parents[1] / "traces"
ANY_CLUSTER = "dgx-h100"  # a plan holds no hardware


def plan_calls(plan: Plan) -> list[Call]:
    """The plan's collectives in issue order."""
    calls = []
    for op in plan.ops:
        if isinstance(op.work, Collective):
            group = plan.groups[op.work.group]
            work = op.work
            calls.append(Call(work.kind, work.bytes, work.dtype, group.size, group.stride, op.module))
    return calls


def first_difference(mine: Sequence[Call], theirs: Sequence[Call]) -> str | None:
    """None when two lists say the same on the wire; else where they part."""
    for index, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one.wire != other.wire:
            return f"call {index}: zsim {one.wire} ({one.unit}), torch {other.wire} ({other.unit})"
    if len(mine) != len(theirs):
        return f"zsim has {len(mine)} calls, torch {len(theirs)}"
    return None


def experiment_of(case: Case) -> zsim.Experiment:
    """The oracle's question as a zsim experiment."""
    return zsim.Experiment(
        model=case.model,
        cluster=ANY_CLUSTER,
        gpus=case.world_size,
        training={
            "sequence_length": case.sequence_length,
            "micro_batch_size": case.micro_batch_size,
            "gradient_accumulation_steps": case.gradient_accumulation_steps,
            "precision": case.param_dtype,
            "activation_checkpointing": case.activation_checkpointing,
            "attention": "math" if case.param_dtype == "fp32" else "flash",
            "gradient_clipping": case.gradient_clipping,
        },
        strategy={
            "kind": "fsdp2",
            "reshard_after_forward": case.reshard_after_forward,
            "replicate": case.replicate,
            "wrapping": case.wrapping,
            "param_dtype": case.param_dtype,
            "reduce_dtype": case.reduce_dtype,
        },
    )


def oracle_answers() -> list[Path]:
    return sorted((TRACES / "oracle").glob("*.json"))


def recordings() -> list[Path]:
    """Summaries of the recorded runs that zsim has a plan for."""
    paths = sorted((TRACES / "gloo").glob("*/summary.json"))
    return [path for path in paths if json.loads(path.read_text())["experiment"] is not None]


def recorded_plan(summary: dict[str, Any]) -> Plan:
    return zsim.make_plan(zsim.Experiment(cluster=ANY_CLUSTER, **summary["experiment"]))


def memory_errors(plan: Plan, answer: Answer) -> dict[str, float]:
    """(zsim - torch) / torch of each category's peak."""
    peaks = plan_peaks(plan)
    return {name: peaks[name] / measured - 1 for name, measured in answer.peak_bytes.items() if measured}


def show(name: str, difference: str | None, errors: dict[str, float]) -> str:
    memory = "  ".join(f"{category} {error:+.2%}" for category, error in errors.items())
    return f"{'same calls' if difference is None else 'DIFFERENT'}  {name}  {memory}" + (
        f"\n    {difference}" if difference else ""
    )


def main() -> int:
    has_missed = False
    for path in oracle_answers():
        answer = Answer.read(path)
        plan = zsim.make_plan(experiment_of(answer.case))
        difference = first_difference(plan_calls(plan), answer.calls)
        print(show(path.stem, difference, memory_errors(plan, answer)))
        has_missed |= difference is not None
    for path in recordings():
        summary = json.loads(path.read_text())
        calls = unfold(summary["calls"])
        difference = first_difference(plan_calls(recorded_plan(summary)), calls)
        print(show(path.parent.name, difference, {}))
        has_missed |= difference is not None
    return int(has_missed)


if __name__ == "__main__":
    sys.exit(main())
