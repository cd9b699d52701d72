"""The page of `[rl]` has the defaults that the frameworks have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from zsim.specs.strategy.registry import workflow_names
from zsim.units import format_bytes
from zsim.workflows.rl.framework import RlFramework, workflow_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rl.md"
COLUMNS = (
    "`framework`", "`placement`", "`rollout.engine`, `max_num_seqs`, `max_num_batched_tokens`",
    "`gpu_memory_utilization`", "`sync.transport`, `bucket`", "`offload`, `sleep_level`", "`reference`",
    "`old_logprobs`", "`batching`",
)  # fmt: skip


def row(name: str, framework: RlFramework) -> str:
    engine, bounds = next(iter(framework.engines.items()))
    transports = [
        f"{way}, {format_bytes(int(framework.syncs[way].bucket_bytes))}"
        for way in dict.fromkeys(framework.transports.values())
    ]
    offloads = framework.offloads
    moved = [name for name in ("parameters", "optimizer") if getattr(offloads, name)]
    shares = dict.fromkeys(f"{share:g}" for share in framework.memory_utilization.values())
    reference = ("resident" if framework.keeps_reference else "host") if framework.has_reference else "none"
    cells = (
        name,
        ", ".join(framework.placements),
        f"{engine}, {bounds[0]:,}, {bounds[1]:,}" if bounds else "the trainer's batches",
        " or ".join(shares) or "-",
        " or ".join(transports),
        f"{' and '.join(moved) or 'none'}, {offloads.sleep_level}"
        if "colocated" in framework.placements
        else "-",
        reference,
        "recomputed" if framework.recomputes_logprobs else "rollout",
        framework.batching,
    )
    return f"| {' | '.join(cells)} |"


def rows() -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|" + "---|" * len(COLUMNS)
    for name in workflow_names():
        yield row(name, workflow_of(name))


def test_the_page_has_the_defaults_of_every_framework(request: pytest.FixtureRequest) -> None:
    text, lines = PAGE.read_text(encoding="utf-8"), list(rows())
    if request.config.getoption("--update"):
        before, _, rest = text.partition(lines[0] if lines[0] in text else "| `framework` |")
        after = rest[rest.index("\n\n") :]
        text = before + "\n".join(lines) + after
        PAGE.write_text(text, encoding="utf-8")
    assert "\n".join(lines) in text
