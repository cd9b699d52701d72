"""Traces of small jobs, kept byte for byte: whatever is moved or merged, the same step comes out.

`pytest tests/golden --update` rewrites them; the commit that does so says why.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.golden.jobs import JOBS
from zsim.trace.trace import Trace

FOLDER = Path(__file__).parent


def number(value: float) -> str:
    """Twelve significant digits: the last four of a double depend on the processor's vector units."""
    return f"{value:.12g}"


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(number(value))
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


def lines(trace: Trace) -> Iterator[str]:
    """One line per span, change of memory and wait of a host, in the trace's own order."""
    for rank, index, *times in zip(
        trace.ranks.tolist(),
        trace.info_indices.tolist(),
        trace.issue_seconds.tolist(),
        trace.start_seconds.tolist(),
        trace.end_seconds.tolist(),
        strict=True,
    ):
        info = trace.infos[index]
        yield "\t".join(
            [str(rank), *map(number, times), *map(str, info[:9]), number(info.flops), number(info.hbm_bytes)]
        )
    memory = trace.memory
    assert memory is not None
    for rank, seconds, device, category, delta, name in zip(
        memory.ranks.tolist(),
        memory.host_seconds.tolist(),
        memory.devices,
        memory.categories,
        memory.deltas.tolist(),
        memory.names,
        strict=True,
    ):
        yield "\t".join([str(rank), number(seconds), device, category, str(delta), name])
    for rank, start, end, index in trace.host_blocks:
        yield "\t".join([str(rank), number(start), number(end), trace.infos[index].name])


def text_of(job: dict[str, Any]) -> str:
    """The trace's lines, the step and the peaks."""
    result = zsim.simulate(zsim.Experiment(**job))
    report = result.report.to_dict()
    kept = rounded({key: report[key] for key in ("step_seconds", "peak_bytes")})
    return "\n".join(lines(result.trace)) + "\n" + json.dumps(kept, indent=1, sort_keys=True) + "\n"


@pytest.mark.parametrize("name", JOBS)
def test_a_small_job_gives_the_trace_that_is_kept(name: str, request: pytest.FixtureRequest) -> None:
    path, text = FOLDER / f"{name}.txt.gz", text_of(JOBS[name])
    if request.config.getoption("--update"):
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    kept = gzip.decompress(path.read_bytes()).decode()
    if text != kept:
        pairs = zip(kept.splitlines(), text.splitlines(), strict=False)
        changed = next(
            ((n, a, b) for n, (a, b) in enumerate(pairs, 1) if a != b), (0, "", "(longer or shorter)")
        )
        pytest.fail(f"{name}: line {changed[0]}\n  kept: {changed[1]}\n  now:  {changed[2]}")


def test_no_trace_is_kept_of_a_job_that_is_gone() -> None:
    assert {path.name.removesuffix(".txt.gz") for path in FOLDER.glob("*.txt.gz")} == set(JOBS)


def test_a_job_gives_the_same_bytes_twice() -> None:
    assert text_of(JOBS["hsdp"]) == text_of(JOBS["hsdp"])
