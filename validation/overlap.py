"""Communication that hides behind computation, on a CPU: `python -m validation.overlap --out traces/shaped`.

Each rank is a node of its own with a link of a chosen speed (`validation.network`). The engine's stage 3
runs with and without gathering ahead, turn by turn in the same processes, so that both meet the same
disturbances. Written down: step times, the bytes that each node's interface received against the closed
form, and of each gather how long it took and how much of that a unit computed."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from validation import network
from validation.examples import MEDIUM, blocks_of, make_batch
from validation.launch import run
from validation.llama import Llama
from validation.machine_load import CpuLoad, foreign_fraction
from validation.provenance import provenance, write_checksums
from validation.tracing import Tracer, now
from validation.zero.config import ZeroConfig
from validation.zero.engine import ZeroEngine

LENGTH = 64
WAYS = {"serial": 0, "ahead": 1}  # number of units gathered ahead


def measure(rank: int, world_size: int, sequences: int, steps: int) -> dict[str, Any]:
    """Measure on one node: step seconds of each way, received bytes per step, declared bytes, and the spans
    of the last step."""
    engines: dict[str, ZeroEngine] = {}
    for way, prefetch in WAYS.items():
        torch.manual_seed(0)
        model = Llama(MEDIUM)
        config = ZeroConfig(stage=3, prefetch=prefetch, keep_gathered=False)
        engines[way] = ZeroEngine(model, config, blocks=blocks_of(model), tracer=Tracer())
    found: dict[str, Any] = {way: {"seconds": [], "received": []} for way in WAYS}
    batch = make_batch(rank, sequences, LENGTH, MEDIUM.vocab_size)
    load = CpuLoad()
    for _ in range(steps):
        for way, engine in engines.items():
            engine.tracer.events.clear()
            engine.comm.calls.clear()
            before = _quiet_counter()
            start = now()
            engine.backward(engine(*batch).loss)
            engine.step()
            found[way]["seconds"].append((now() - start) / 1e9)
            found[way]["received"].append(_quiet_counter() - before)
            found[way]["declared"] = sum(call.bytes for call in engine.comm.calls)
            found[way]["events"] = [
                event for event in engine.tracer.events if event["kind"] in ("coll", "comp", "phase")
            ]
    found["cpu_ticks"] = load.since()
    for engine in engines.values():
        engine.close()
    return found


def _quiet_counter() -> int:
    dist.barrier()
    count = network.received_bytes("eth0")
    dist.barrier()
    return count


def gathers_and_cover(events: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """(bytes, seconds, seconds of them during which a unit computed) of each all-gather.

    The root's computation encloses that of all units, so only the other units count.
    """
    computing = [
        (event["issue_ns"], event["done_ns"])
        for event in events
        if event["kind"] == "comp" and event["unit"] != "root" and "done_ns" in event
    ]
    rows = []
    for event in events:
        if event["kind"] == "coll" and event["op"] == "all_gather" and "done_ns" in event:
            start, end = event["issue_ns"], event["done_ns"]
            covered = sum(max(0, min(end, stop) - max(start, begin)) for begin, stop in computing)
            rows.append((event["bytes"], (end - start) / 1e9, covered / 1e9))
    return rows


def study(rate: str, sequences: int, steps: int) -> dict[str, Any]:
    """Run one link rate and batch on two nodes; returns the recording."""
    ranks = run(
        "validation.overlap:measure",
        2,
        (sequences, steps),
        prefix=network.PRIVATE,
        link_rate=rate,
        timeout=300,
    )
    busy, total, _ = ranks[0]["cpu_ticks"]
    own = sum(rank["cpu_ticks"][2] for rank in ranks)
    result: dict[str, Any] = {
        "model": asdict(MEDIUM),
        "rate": rate,
        "sequences_per_node": sequences,
        "sequence_length": LENGTH,
        "nodes": 2,
        "foreign_cpu_fraction": foreign_fraction(busy, total, own),
    }
    for way in WAYS:
        seconds = [max(pair) for pair in zip(*(rank[way]["seconds"] for rank in ranks), strict=True)][2:]
        rows = gathers_and_cover(ranks[0][way]["events"])
        result[way] = {
            "step_seconds": {
                "mean": statistics.fmean(seconds),
                "median": statistics.median(seconds),
                "min": min(seconds),
                "max": max(seconds),
                "all": [round(value, 6) for value in seconds],
            },
            "declared_wire_bytes": ranks[0][way]["declared"] // 2,
            "received_bytes": [rank[way]["received"][-1] for rank in ranks],
            "gather_seconds": round(sum(row[1] for row in rows), 6),
            "gather_seconds_while_computing": round(sum(row[2] for row in rows), 6),
        }
    return result


def main(words: list[str]) -> int:
    arguments = argparse.ArgumentParser(prog="python -m validation.overlap", description=__doc__)
    arguments.add_argument("--out", type=Path, default=Path("recordings"))
    arguments.add_argument("--steps", type=int, default=12)
    options = arguments.parse_args(words)
    if network.why_not_shaped():
        print(f"SKIPPED: {network.why_not_shaped()}", file=sys.stderr)
        return 3
    options.out.mkdir(parents=True, exist_ok=True)
    for rate in ("1gbit", "400mbit"):
        for sequences in (8, 32):
            result = study(rate, sequences, options.steps)
            origin = provenance("python -m validation.overlap", backend="gloo", shaper=f"tc tbf {rate}")
            path = options.out / f"zero3-{rate}-{sequences}sequences.json"
            path.write_text(json.dumps({"provenance": origin, **result}, indent=1) + "\n")
            serial, ahead = (result[way]["step_seconds"]["median"] for way in WAYS)
            print(
                f"{path}: {serial:.3f} s serial, {ahead:.3f} s ahead ({ahead / serial - 1:+.0%})", flush=True
            )
    if options.out.parent.name == "traces":
        write_checksums(options.out.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
