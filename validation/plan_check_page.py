"""`plan_check.md`: zsim against PyTorch's own FSDP2 at up to 1,024 ranks, row by row.

`python -m validation.plan_check_page` writes it anew from `traces/oracle`; a test holds it to today's
plans."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import zsim
from validation import plan_check
from validation.cases.cases import oracle_experiment
from validation.oracle.answer import Answer
from zsim.comparison.plan_check import calls_of_plan

TARGET = Path(__file__).parent / "plan_check.md"
CATEGORIES = ("parameters", "gradients", "optimizer_states", "activations", "buffers", "total")
HEAD = """# The plan check at scale

<!-- python -m validation.plan_check_page writes this page -->

For every row the real `fully_shard` of torch 2.13 ran one step as rank 0 of that many ranks, on fake
tensors (`python -m validation.oracle`), and zsim planned the same. **Calls**: the collectives of the step;
in every row all of zsim's are the same as PyTorch's, in kind, bytes, type, group and order. **Peak**: what
`FSDPMemTracker` counted, rank 0, in GB. The errors are zsim's against that, by category; each category is
compared at its own maximum, the total at the maximum of the sum. Parameters and gradients are equal to the
byte, all totals are within 0.02 %, and every other figure is within 1 %. On 8 ranks the groups of
`reshard` are of 4: of 8 they are all. Rows of `torchtitan-code` have torch's own RMSNorm.

## What differs, to the byte

- **Optimizer states**: AdamW's step counters, 4 bytes per parameter tensor, which zsim leaves out.
- **Activations**, at their own maximum: zsim leaves out the rotary tables (4,194,304 bytes), the labels
  (65,536), the norms' reciprocals (4 bytes per token and norm that is kept) and two scalars of the loss.
- **Total**: the same.
- FSDPMemTracker counts bytes as they are asked for: no allocator rounding, no CUDA context, no workspaces,
  on either side.

| model | ranks | reshard | replicas | wrapping | checkpoints | calls | peak GB | """
HEAD += " | ".join(name.replace("_", " ") for name in CATEGORIES) + " |\n"
HEAD += "|---|---:|---|---:|---|---|---:|---:|" + "---:|" * len(CATEGORIES) + "\n"


def rows() -> Iterator[str]:
    for path in plan_check.oracle_answers():
        answer = Answer.read(path)
        case = answer.case
        plan = zsim.make_plan(oracle_experiment(asdict(case)))
        difference = plan_check.first_difference(calls_of_plan(plan), answer.calls)
        errors = plan_check.memory_errors(plan, answer)
        wrapping = case.wrapping if case.code == "transformers" else f"{case.wrapping}, torchtitan-code"
        more = f", {case.gradient_accumulation_steps} micro-batches" * (case.gradient_accumulation_steps > 1)
        more += ", clipping" * (case.gradient_clipping > 0)
        cells = [
            case.model,
            f"{case.world_size:,}",
            str(case.reshard_after_forward).lower(),
            str(case.replicate),
            wrapping + more,
            case.activation_checkpointing,
            f"{len(answer.calls)}" if difference is None else f"DIFFERENT: {difference}",
            f"{answer.peak_bytes['total'] / 1e9:.2f}",
            *(percent(errors[name]) for name in CATEGORIES),
        ]
        yield "| " + " | ".join(cells) + " |"


def percent(error: float) -> str:
    """A signed percentage; 0 if the bytes are equal, or almost."""
    return "0" if abs(error) < 5e-6 else f"{error:+.2%}"


def page() -> str:
    return HEAD + "\n".join(rows()) + "\n"


if __name__ == "__main__":
    TARGET.write_text(page())
    sys.exit(0)
