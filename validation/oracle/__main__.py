"""`python -m validation.oracle`: ask, print, write JSON; `--record-all DIR` makes the recorded answers."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import get_args

from validation.oracle import case as cases
from validation.oracle.answer import Answer
from validation.oracle.recorded import recorded_cases
from validation.provenance import provenance
from zsim.comparison.plan_check import fold


def parse_reshard(text: str) -> bool | int:
    """The value of `true`, `false` or a group size."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text)


def parser() -> argparse.ArgumentParser:
    """A parser whose options are `Case`'s fields."""
    arguments = argparse.ArgumentParser(prog="python -m validation.oracle", description=__doc__)
    add = arguments.add_argument
    add("--model", help="llama-3-8b, ..., `llama-3-8b@4` for its first 4 blocks, or a config.json")
    add("--world-size", type=int)
    add("--reshard-after-forward", type=parse_reshard, default=True, metavar="true|false|N")
    add("--replicate", type=int, default=1, help="> 1 is HSDP")
    add("--code", choices=get_args(cases.Code), default="transformers", help="whose Llama")
    add("--wrapping", choices=get_args(cases.Wrapping), default="torchtitan-0.1")
    add("--activation-checkpointing", choices=get_args(cases.Checkpointing), default="none")
    add("--micro-batch-size", type=int, default=1)
    add("--sequence-length", type=int, default=8192)
    add("--gradient-accumulation-steps", type=int, default=1)
    add("--param-dtype", choices=get_args(cases.DtypeName), default="bf16")
    add("--reduce-dtype", choices=get_args(cases.DtypeName), default="fp32")
    add("--optimizer", choices=get_args(cases.OptimizerKind), default="fused")
    add("--gradient-clipping", type=float, default=0.0, help="largest gradient norm; 0 is none")
    add("--json", type=Path, help="write the answer to this file")
    add("--record-all", type=Path, metavar="DIR", help="make the recorded answers again")
    return arguments


def show(answer: Answer, seconds: float) -> str:
    """The answer as text: the schedule with repetitions folded, and memory."""
    lines = [f"{answer.case.name}: {answer.parameters:,} parameters, {len(answer.calls)} collectives"]
    for entry in fold(answer.calls):
        times, rows = (entry["times"], entry["calls"]) if isinstance(entry, dict) else (1, [entry])
        for index, (kind, size, dtype, group, stride, unit) in enumerate(rows):
            count = f"{times:3} x" if index == 0 else "     "
            apart = f", {stride} apart" if stride > 1 else ""
            lines.append(f"  {count} {kind:15}{size:15,} B {dtype:5} {group} ranks{apart:12}  {unit}")
    lines.append("peak bytes of one rank, each category at its own maximum")
    lines += [f"  {name:17}{size:17,}" for name, size in answer.peak_bytes.items()]
    lines.append("FSDPMemTracker's categories at the peak of the sum")
    lines += [f"  {name:17}{size:17,}" for name, size in answer.at_peak.items()]
    return "\n".join([*lines, f"found in {seconds:.1f} s"])


def command_of(case: cases.Case) -> str:
    """The command line that asks this question."""
    words = []
    for item in fields(case):
        value = getattr(case, item.name)
        if value != item.default:
            words += [f"--{item.name.replace('_', '-')}", str(value).lower()]
    return shlex.join(["python", "-m", "validation.oracle", *words])


def answer_and_time(case: cases.Case) -> tuple[Answer, float]:
    from validation.oracle.run import ask

    start = time.perf_counter()
    return ask(case), time.perf_counter() - start


def main(arguments: list[str]) -> int:
    options = vars(parser().parse_args(arguments))
    folder, file = options.pop("record_all"), options.pop("json")
    if folder:
        for case in recorded_cases():
            answer, seconds = answer_and_time(case)
            path = folder / f"{case.name}.json"
            path.write_text(answer.to_json(provenance(command_of(case))))
            print(f"{path}: {len(answer.calls)} collectives, {seconds:.1f} s", flush=True)
        return 0
    if not options["model"] or not options["world_size"]:
        parser().error("--model and --world-size are needed")
    try:
        case = cases.Case(**options)
        answer, seconds = answer_and_time(case)
    except ValueError as error:
        print(f"oracle: {error}", file=sys.stderr)
        return 2
    print(show(answer, seconds))
    if file:
        file.write_text(answer.to_json(provenance(command_of(case))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
