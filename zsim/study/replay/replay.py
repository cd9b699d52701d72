"""`zsim.replay`: re-run a recorded step, unchanged or on other hardware."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zsim.engine.replay import ReplayHardware, run_replay
from zsim.errors import InputError
from zsim.plan.passes.repeated_step import program_is_drained
from zsim.plan.recorded.infer import recorded_ranks, shows_host
from zsim.plan.recorded.rank import RecordedRank, isolate_kernels, repeat_rank
from zsim.report.breakdown import step_breakdown
from zsim.report.views.meanings import BREAKDOWN, span_meaning
from zsim.report.views.result import Column
from zsim.report.views.text.plain import paragraph, table
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.topology.node_links import require_identical_nodes
from zsim.study.replay.what_if import WhatIf, change_rank, make_what_if, recorded_gpu, speedups
from zsim.trace.trace import COLLECTIVES, Trace
from zsim.units import format_bytes, format_seconds

_MAX_RANKS = 256


@dataclass(frozen=True)
class Replay:
    """A recorded step and the same step replayed.

    `recorded.step_seconds` is the step of the rank that was slowest when recorded, as in `Trace.steps`.
    """

    recorded: Trace
    replayed: Trace
    rank: int
    """The rank whose times are reported: the slowest in the replay."""
    recorded_seconds: float
    """The recorded step of `rank`, including its waits for slower ranks."""
    step_seconds: float
    """The replayed step of `rank`."""
    unexplained_seconds: float
    """Delays above 50 us that nothing in the recording explains. They are replayed unchanged."""
    cluster: str | None
    world_size: int
    notes: tuple[str, ...]
    keeps_kernels: bool = False
    """On another cluster, kernels keep their recorded durations, since the device of the recording is not
    known to be a GPU.
    """

    @property
    def written(self) -> Trace:
        """The replayed step as ranks of the new world. A representative whose number is beyond the new world
        becomes its rank 0.
        """
        if self.rank < self.world_size:
            return self.replayed
        blocks = tuple((0, *block[1:]) for block in self.replayed.host_blocks)
        allocator_blocks = tuple((0, *block[1:]) for block in self.replayed.allocator_blocks)
        return replace(
            self.replayed,
            ranks=self.replayed.ranks * 0,
            host_blocks=blocks,
            allocator_blocks=allocator_blocks,
        )

    def breakdowns(self) -> dict[str, dict[str, float]]:
        """Seconds of the step by category, recorded and replayed."""
        recorded_step = replace(self.recorded, step_seconds=self.recorded_seconds).rank_view(self.rank)
        recorded = step_breakdown(recorded_step, self.rank).seconds
        replayed = replace(self.replayed, step_seconds=self.step_seconds).rank_view(self.rank)
        return {"recorded": recorded, "replayed": step_breakdown(replayed, self.rank).seconds}

    def collectives(self) -> list[dict[str, Any]]:
        """Rows by kind, group and size on `rank`: the count, the recorded seconds, the transfer part of them,
        and the replayed seconds."""
        rows: dict[tuple[str, str, int], dict[str, Any]] = {}
        before = self.recorded.select_rank(self.rank)
        transfers = before.transfer_seconds
        for span, (_, info, start, end) in enumerate(before.rows()):
            if info.kind in COLLECTIVES:
                row = rows.setdefault((info.kind, info.group, info.bytes), _row(info))
                row["count"] += 1
                row["recorded_seconds"] += end - start
                transfer = math.nan if transfers is None else float(transfers[span])
                row["transfer_seconds"] += end - start if math.isnan(transfer) else transfer
        for _, info, start, end in self.replayed.select_rank(self.rank).rows():
            if info.kind in COLLECTIVES:
                row = rows[(info.kind, info.group, info.bytes)]
                row["group_size"] = info.group_size
                row["replayed_seconds"] += end - start
        return list(rows.values())

    def to_dict(self) -> dict[str, Any]:
        """The content of `zsim replay --json`."""
        return {
            "rank": self.rank,
            "recorded_seconds": self.recorded_seconds,
            "recorded_seconds_of_slowest_rank": self.recorded.step_seconds,
            "step_seconds": self.step_seconds,
            "relative_change": self.step_seconds / self.recorded_seconds - 1,
            "unexplained_seconds": self.unexplained_seconds,
            "cluster": self.cluster,
            "keeps_kernels": self.keeps_kernels,
            "recorded_world_size": self.recorded.world_size,
            "world_size": self.world_size,
            "ranks_replayed": sorted(set(self.replayed.ranks.tolist())),
            "breakdown_seconds": self.breakdowns(),
            "collectives": self.collectives(),
            "notes": list(self.notes),
        }


def _row(info: Any) -> dict[str, Any]:
    return {
        "kind": info.kind, "group": info.group, "group_size": info.group_size, "bytes": info.bytes,
        "dtype": info.dtype, "count": 0, "recorded_seconds": 0.0, "transfer_seconds": 0.0,
        "replayed_seconds": 0.0,
    }  # fmt: skip


def replay(
    trace: Trace,
    *,
    cluster: str | Mapping[str, Any] | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    recorded_on: str | None = None,
    step: int | None = None,
) -> Replay:
    """Run a recorded step again: its kernels with their durations, its collectives concurrently on all ranks.

    Without `cluster` every span takes its recorded time, and each part of the recorded step is reproduced.
    With `cluster`, collectives run on that fabric, and `gpus` or `nodes` changes the number of GPUs.
    `recorded_on` names the GPU of the recording if the trace does not. `step` is the number of a step
    (default: the typical one).

    Raises InputError for a trace that cannot be replayed in this way, with the reason.
    """
    if cluster is None and (gpus is not None or nodes is not None):
        raise InputError("replay: another number of GPUs needs a cluster: their transfers are modelled on it")
    if cluster is None and recorded_on is not None:
        raise InputError(
            f"replay: recorded_on {recorded_on} has no effect without a cluster: kernels keep their durations"
        )
    step_trace = _select_step(trace, step)
    ranks = recorded_ranks(step_trace)
    notes = [str(note) for note in step_trace.metadata.get("notes", ())]
    if cluster is None:
        return _result(step_trace, ranks, *run_replay(step_trace, ranks, None), notes, None)
    target_cluster = load_cluster(cluster)
    require_identical_nodes(target_cluster, "replay on another cluster")
    what_if = make_what_if(step_trace, target_cluster, gpus, nodes)
    gpu = recorded_gpu(step_trace.metadata, recorded_on)
    notes += _kernel_notes(gpu, what_if.cluster.gpu, is_cpu=step_trace.metadata.get("computes_on") == "cpu")
    is_whole = len(ranks) == step_trace.world_size == what_if.world_size <= _MAX_RANKS
    is_folded = not is_whole and what_if.communicator_indices is None
    if is_folded:
        longest_rank = max(ranks, key=lambda rank: (_busy_seconds(ranks[rank]), -rank))
        if len(ranks) > 1:
            notes.append(f"rank {longest_rank}, the one that computes longest, represents all ranks")
        ranks = {longest_rank: ranks[longest_rank]}
    after = what_if.cluster.gpu.interference.compute_slowdown
    hardware = ReplayHardware(
        what_if.topology, what_if.groups, is_folded, after, what_if.communicator_indices
    )
    if hardware.is_uneven(step_trace):
        notes.append("groups lie at unequal places of the network; the slowest represents them all")
    replayed_ranks, seconds, replayed = _replay_ranks(step_trace, ranks, hardware, what_if, gpu)
    if not all(shows_host(step_trace, rank) for rank in ranks):
        late = recorded_ranks(step_trace, is_host_in_time=False)
        _, longest, _ = _replay_ranks(
            step_trace, {rank: late[rank] for rank in ranks}, hardware, what_if, gpu
        )
        notes.append(
            "the recording shows the GPU alone: the host is taken to be ahead wherever the GPU went on "
            "without a pause, and pauses stay; if it issued each kernel just as that began, the step is "
            f"{format_seconds(max(longest.values()))}"
        )
    notes += dict.fromkeys(what_if.notes)
    result = _result(step_trace, replayed_ranks, seconds, replayed, notes, what_if)
    return replace(result, keeps_kernels=gpu is None)


def _replay_ranks(
    step_trace: Trace,
    ranks: Mapping[int, RecordedRank],
    hardware: ReplayHardware,
    what_if: WhatIf,
    gpu: Gpu | None,
) -> tuple[Mapping[int, RecordedRank], dict[int, float], Trace]:
    """The ranks on other hardware, their seconds, and the replayed step. `gpu` is the recording's."""
    if hardware.is_folded:
        ranks = {number: replace(rank, **_rebase_times(rank)) for number, rank in ranks.items()}
    slowdown = (gpu or what_if.cluster.gpu).interference.compute_slowdown
    ranks = {
        number: change_rank(isolate_kernels(rank, slowdown), step_trace, what_if, gpu)
        for number, rank in ranks.items()
    }
    num_steps = 1 if any(program_is_drained(rank.program) for rank in ranks.values()) else 2
    if num_steps == 2:
        ranks = {number: repeat_rank(rank) for number, rank in ranks.items()}
    return ranks, *run_replay(step_trace, ranks, hardware, num_steps)


def _kernel_notes(gpu: Gpu | None, new: Gpu, *, is_cpu: bool) -> list[str]:
    """Notes on the assumptions for kernels recorded on `gpu` and replayed on `new`. `gpu` is None where it is
    unknown, or the CPU.
    """
    notes = []
    if gpu is None and is_cpu:
        notes.append(
            "the recorded ranks computed on a CPU: kernels keep their durations, which are not those of "
            f"{new.name}; only collectives are as on this cluster (--recorded-on cpu-core-zen4 scales "
            "kernels by the ratio of data sheets)"
        )
    elif gpu is None:
        notes.append(
            "the recording's GPU is not known: kernels keep their durations (--recorded-on names it)"
        )
    elif gpu.name != new.name:
        matrix, memory = speedups(gpu, new)
        notes.append(
            f"kernels were recorded on {gpu.name}: matrix products go {matrix:.2f} times as fast, by the "
            f"ratio of 16-bit peaks, all others {memory:.2f} times, by that of memory bandwidths"
        )
    before, after = (gpu or new).interference, new.interference
    if before.compute_slowdown > 1 or after.compute_slowdown > 1:
        notes.append(
            f"kernels run {before.compute_slowdown:g} times slower while a collective is under way in the "
            f"recording, {after.compute_slowdown:g} times in the replay ({after.evidence})"
        )
    if after.communication_slowdown > 1:
        notes.append(
            f"collectives take {after.communication_slowdown:g} times as long inside a node beside kernels "
            f"({after.evidence})"
        )
    return notes


def _select_step(trace: Trace, number: int | None) -> Trace:
    if trace.metadata.get("is_timed") is False:
        raise InputError(
            "replay: the trace says which collectives ran, not how long anything took; expected one of "
            "torch.profiler"
        )
    try:
        step = trace.typical_step() if number is None else trace.select_step(number)
    except KeyError as error:
        raise InputError(f"replay: no {error.args[0]}") from None
    if step.step_seconds <= 0:
        raise InputError("replay: the recorded step took no time; is the trace of a run?")
    return step


def _busy_seconds(rank: RecordedRank) -> float:
    """Seconds of the rank's work other than collectives."""
    return sum(work.seconds for work in rank.payloads if work.kind not in COLLECTIVES)


def _rebase_times(rank: RecordedRank) -> dict[str, Any]:
    """The rank's begin times relative to the begin of the rank itself."""
    begins = {stream: begin - rank.begin for stream, begin in rank.stream_begins.items()}
    return {"begin": 0.0, "host_begin": rank.host_begin - rank.begin, "stream_begins": begins}


def _result(
    step: Trace,
    ranks: Mapping[int, RecordedRank],
    seconds: Mapping[int, float],
    replayed: Trace,
    notes: list[str],
    what_if: WhatIf | None,
) -> Replay:
    slowest = max(seconds, key=lambda rank: (seconds[rank], -rank))
    rank = ranks[slowest]
    if format_seconds(rank.recorded_seconds) != format_seconds(step.step_seconds) and step.steps:
        notes.append(
            f"rank {slowest} is the slowest when replayed; when recorded rank {step.steps[0].slowest_rank()} "
            f"was, whose {format_seconds(step.step_seconds)} are the step of the recording"
        )
    world_size = step.world_size if what_if is None else what_if.world_size
    return Replay(
        recorded=step,
        replayed=replace(replayed, world_size=world_size),
        rank=slowest,
        recorded_seconds=rank.recorded_seconds,
        step_seconds=seconds[slowest],
        unexplained_seconds=rank.unexplained_seconds,
        cluster=None if what_if is None else what_if.cluster.name,
        world_size=world_size,
        notes=tuple(notes),
    )


_MAX_ROWS = 12


def replay_lines(replay: Replay, name: str) -> Iterator[str]:
    """The lines of a replay. The step comes first, then its categories and collectives, recorded and
    replayed, and the notes last.
    """
    where = f"{replay.cluster}, {_gpus(replay.world_size)}" if replay.cluster else "as recorded"
    if replay.keeps_kernels:
        where = f"kernels as recorded, collectives on {where}"
    recorded_on = replay.recorded.metadata.get("gpu", "")
    yield f"{name}  ({_gpus(replay.recorded.world_size)}{', ' + recorded_on if recorded_on else ''})"
    yield f"replayed: {where}"
    yield ""
    breakdowns = replay.breakdowns()
    rows = [_change_row("step", replay.recorded_seconds, replay.step_seconds)]
    for category, meaning in BREAKDOWN.items():
        before, after = breakdowns["recorded"][category], breakdowns["replayed"][category]
        if before or after:
            rows.append(_change_row(f"  {meaning.label}", before, after))
    yield from table([_title(f"rank {replay.rank}"), *_columns("recorded", "replayed", "change")], rows)
    collectives = sorted(replay.collectives(), key=lambda row: -row["replayed_seconds"])
    if collectives:
        yield ""
        columns = [_title("collectives"), *_columns("recorded", "transfer", "replayed")]
        yield from table(columns, [_collective(row) for row in collectives[:_MAX_ROWS]])
    if len(collectives) > _MAX_ROWS:
        yield f"and {len(collectives) - _MAX_ROWS} more (--json)"
    if replay.unexplained_seconds > 0:
        yield ""
        yield from paragraph(
            f"{format_seconds(replay.unexplained_seconds)} of delays that the recording does not explain are "
            "replayed as they were",
            indent=2,
        )
    if replay.notes:
        yield ""
    for note in replay.notes:
        yield from paragraph(note, first="note: ", indent=2)


def _gpus(count: int) -> str:
    return f"{count:,} rank{'s' * (count != 1)}"


def _title(title: str) -> Column:
    return Column(title, is_left=True, min_width=36)


def _columns(*titles: str) -> list[Column]:
    return [Column(title, min_width=11) for title in titles]


def _change_row(title: str, before: float, after: float) -> tuple[str, ...]:
    change = f"{(after / before - 1) * 100:+.1f} %" if before > 0 else "new"
    return title, format_seconds(before), format_seconds(after), change


def _collective(row: dict[str, Any]) -> tuple[str, ...]:
    size = f" {format_bytes(row['bytes'])}" if row["bytes"] else ""
    title = f"{row['count']} x {span_meaning(row['kind']).label}{size} ({row['group_size']})"
    seconds = (row[f"{name}_seconds"] for name in ("recorded", "transfer", "replayed"))
    return title, *(format_seconds(value) for value in seconds)
