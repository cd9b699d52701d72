"""ZeRO-3 as DeepSpeed ran it in the spring of 2021, before its first repairs: `python -m
validation.scaling.early_zero3` prints what that makes of Megatron's published comparison.

zsim has the schedules of 0.10.3 and later. What the first releases did otherwise is said in DeepSpeed's own
threads: every gather began with `torch.cuda.synchronize()`, so nothing was fetched ahead (#1188, #1069); it
was `torch.distributed.all_gather` into a list, which torch ends with one copy per rank, and DeepSpeed with
another of all of it (#1188); gradients were all-reduced (#1173). Nothing here is fitted: a launch costs what
the cluster's file says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from zsim.engine.simulate import simulate_job
from zsim.plan.builder import move_kernels
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Kernels, Op, Plan
from zsim.specs.experiment.load import load_experiment
from zsim.specs.experiment.resolve import resolve

CURVE = Path(__file__).with_name("zero3-175b.toml")
POINTS = ((384, 4), (768, 2), (1536, 1))  # GPUs, sequences in a micro-batch
PUBLISHED_SECONDS = {384: 81.6, 768: 66.7, 1536: 66.7}  # of the table's FLOP/s per GPU
NOTHING_AHEAD = {
    "overlap_comm": False, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0,
    "reduce_scatter": False,
}  # fmt: skip


def early_plan(plan: Plan) -> Plan:
    """The plan with every gather synchronous, and its result copied out rank by rank and then as a whole."""
    ops: list[Op] = []
    number_of: list[int] = []  # of an op's last part, by the op's old number
    last_on: dict[str, int] = {}
    for op in plan.ops:
        moved = op._replace(
            after=tuple(number_of[other] for other in op.after),
            host_waits=tuple(number_of[other] for other in op.host_waits),
        )
        if isinstance(op.work, Collective) and op.work.kind == "all_gather":
            moved = moved._replace(host_waits=tuple(sorted({*moved.host_waits, *last_on.values()})))
        ops.append(moved)
        ops += _copies(op, plan.world_size)
        number_of.append(len(ops) - 1)
        if op.work is not None:
            last_on[op.stream] = len(ops) - 1
    number_of.append(len(ops))
    memory = tuple(
        change._replace(
            op=number_of[change.op - 1] + 1 if change.op else 0,
            until=number_of[change.until] if change.until >= 0 else -1,
        )
        for change in plan.memory
    )
    return plan.map_programs(lambda program: replace(program, ops=tuple(ops), memory=memory))


def _copies(op: Op, ranks: int) -> Iterator[Op]:
    """The copies after a gather, on its stream: `ranks` copies out of torch's flat buffer, then
    DeepSpeed's."""
    if isinstance(op.work, Collective) and op.work.kind == "all_gather":
        size = op.work.bytes
        for name, launches in (("copies of", ranks), ("copy of", 1)):
            work = Kernels(move_kernels(size, size, launches=launches))
            yield Op(
                f"{name} {op.name}", op.stream, work, launches=launches, phase=op.phase, module=op.module
            )


def seconds_of(gpus: int, micro_batch: int) -> dict[str, float]:
    """Seconds of a step: as 0.19.8 runs it, without prefetching, and as the first releases ran it."""
    base = {"gpus": gpus, "training.micro_batch_size": micro_batch}
    alone = base | {f"strategy.config.zero_optimization.{key}": value for key, value in NOTHING_AHEAD.items()}
    job = resolve(load_experiment(CURVE, alone))
    return {
        "today": simulate_job(resolve(load_experiment(CURVE, base))).trace.step_seconds,
        "nothing ahead": simulate_job(job).trace.step_seconds,
        "early": simulate_job(job, plan=early_plan(make_plan(job))).trace.step_seconds,
    }


def main() -> None:
    print(f"{'GPUs':>5} {'published':>10} {'today':>8} {'nothing ahead':>14} {'early':>8}")
    found = {gpus: seconds_of(gpus, size) for gpus, size in POINTS}
    for gpus, seconds in found.items():
        cells = f"{seconds['today']:8.1f} {seconds['nothing ahead']:14.1f} {seconds['early']:8.1f}"
        print(f"{gpus:5} {PUBLISHED_SECONDS[gpus]:10.1f} {cells}")
    print("throughput per GPU, 1,536 over 768")
    for name in ("today", "nothing ahead", "early"):
        print(f"  {name}: {found[768][name] / found[1536][name] / 2:.2f} (published 0.50)")


if __name__ == "__main__":
    main()
