"""ZeRO-3's gathers: one collective per fetch, whose result is cut into the parameters where the host waits.

Transcribed from DeepSpeed 0.19.8 `runtime/zero/partition_parameters.py` (all_gather_coalesced,
AllGatherHandle, AllGatherCoalescedHandle). ZeRO++ and MiCS have other gatherers:
`zsim.frameworks.deepspeed.zeropp.gather`, `zsim.frameworks.deepspeed.stage3.mics`.

# [Note: exact waits]
A gather runs on the process group's stream of its own (`async_op=True`), after what DeepSpeed's stream for
fetches has at that moment. The module waits for the handles of its own parameters on the stream for fetches,
and the compute stream for that stream. So a gather issued ahead delays no module before its own. The code is
the same in 0.8.3, 0.10.3, 0.14.5, 0.16.9 and 0.19.8 (`fetch_sub_module`). Without `overlap_comm` the stream
for fetches is the compute stream, and gathers still overlap with kernels issued after them.
"""

from __future__ import annotations

from collections.abc import Callable

from zsim.cost.kernels.update import cat_launches
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.coordinator import Fetch
from zsim.frameworks.deepspeed.stage3.fetch_trace import FetchTrace, ZeroParameter
from zsim.plan.builder import PlanBuilder
from zsim.plan.ops import CollectiveKind, Group

GATHER = "all_gather"  # the process group's stream

SplitFetch = Callable[[Fetch], list[Fetch]]


class Gatherer:
    """Gathers over the ranks that shard (`group`), in the parameters' type. `stream` is DeepSpeed's for
    fetches. See [Note: exact waits]. `split` cuts a fetch into parts of separate groups, as hpZ's."""

    def __init__(
        self,
        builder: PlanBuilder,
        trace: FetchTrace,
        config: DeepSpeedConfig,
        stream: str,
        group: Group,
        split: SplitFetch | None = None,
    ) -> None:
        self.builder, self.trace, self.config, self.stream = builder, trace, config, stream
        self.group, self._split = group, split
        self.param_bytes = DTYPE_BYTES[config.param_dtype]
        self._started: dict[int, int] = {}  # first parameter of a part in flight -> its collective

    def split_fetch(self, fetch: Fetch) -> list[Fetch]:
        """The calls that a fetch becomes: one for all parameters of the same ranks, or one per parameter.
        Parameters of which no other rank has a part need none.
        """
        fetches = [fetch] if self._split is None else self._split(fetch)
        calls = [call for part in fetches for call in self._split_per_group(part)]
        if self.config.zero.allgather_sequential:
            return [Fetch((number,), part.group) for part in calls for number in part.parameters]
        return calls

    def _split_per_group(self, fetch: Fetch) -> list[Fetch]:
        parameters = self.trace.parameters
        numbers_per_group: dict[str, list[int]] = {}
        for number in fetch.parameters:
            numbers_per_group.setdefault(parameters[number].belongs_to or fetch.group, []).append(number)
        groups = self.builder.groups
        return [
            Fetch(tuple(numbers), name)
            for name, numbers in numbers_per_group.items()
            if groups[name].size > 1
        ]

    def start(self, part: Fetch) -> None:
        """Allocate the gathered tensor and issue the collective."""
        size = self.padded_bytes(part)
        self.builder.allocate("buffers", size, stream=self.stream)
        if self._needs_split(part):
            ranks, name = self.builder.groups[part.group].size, self.parameters(part)[0].name
            self.builder.move(
                f"join shards of {name}", size // ranks, size // ranks, stream=self.stream,
                overhead="deepspeed_part", events=ranks,
            )  # fmt: skip
        kind: CollectiveKind = "all_reduce" if self._is_reduced(part) else "all_gather"
        self._collective(part, size, kind, self.config.param_dtype)

    def finish(self, part: Fetch) -> int:
        """The event after which the parameters can be used. A shared tensor is split into its parameters."""
        event = self._started.pop(part.parameters[0])
        self.builder.stream_wait(self.stream, event)
        if not self._needs_split(part):
            return event
        size, count = self.padded_bytes(part), len(part.parameters)
        self.builder.allocate("buffers", size)
        ranks = self.builder.groups[part.group].size
        event = self.builder.move(
            f"cut {self.parameters(part)[0].name}", size, size, count * cat_launches(ranks),
            stream=self.stream, overhead="deepspeed_gathered_part", events=count * ranks,
        )  # fmt: skip
        self.builder.free_when_done("buffers", size, event)
        return event

    def _is_reduced(self, part: Fetch) -> bool:
        """Whether shards are all-reduced into zeros, in place: never a single parameter or hpZ's copies."""
        is_enabled = self.config.zero.use_all_reduce_for_fetch_params
        return is_enabled and len(part.parameters) > 1 and part.group == self.group.name

    def _needs_split(self, part: Fetch) -> bool:
        """Whether the gathered tensor has to be split into parameters."""
        return len(part.parameters) > 1 and not self._is_reduced(part)

    def gathered_bytes(self, number: int) -> int:
        """Bytes of a gathered parameter until it is released, 0 if no other rank has a part."""
        parameter = self.trace.parameters[number]
        is_whole = parameter.belongs_to and self.builder.groups[parameter.belongs_to].size == 1
        return 0 if is_whole else parameter.padded_numel * self.param_bytes

    def pending_parts(self, first: int) -> tuple[tuple[int, int], ...]:
        """The first parameters of the parts in flight, counted from `first`, and their collectives, counted
        from the next op.
        """
        now = len(self.builder.ops)
        return tuple((number - first, event - now) for number, event in self._started.items())

    def skip(self, parameters: int, num_ops: int) -> None:
        """Count the parts in flight as those of other parameters, so many further, and later ops."""
        self._started = {number + parameters: event + num_ops for number, event in self._started.items()}

    # -- for this class and its subclasses ----------------------------------------------------------------

    def parameters(self, part: Fetch) -> list[ZeroParameter]:
        return [self.trace.parameters[number] for number in part.parameters]

    def padded_bytes(self, part: Fetch) -> int:
        return sum(parameter.padded_numel for parameter in self.parameters(part)) * self.param_bytes

    def _collective(
        self,
        part: Fetch,
        size: int,
        kind: CollectiveKind,
        dtype: str,
        group: str | None = None,
        prefix: str = "",
        *,
        is_blocking: bool = False,
    ) -> int:
        """Issue one call for a part and return its event. `prefix` is a prefix of the name ("scales of ").
        `self.stream` waits for a blocking call (`async_op=False`).
        """
        name = self.trace.parameters[part.parameters[0]].name
        suffix = f" and {len(part.parameters) - 1} more" if len(part.parameters) > 1 else ""
        stream = self.stream if is_blocking else GATHER
        if not is_blocking:
            self.builder.join(GATHER, self.stream)
        event = self.builder.collective(
            kind,
            size,
            dtype,
            group or part.group,
            stream=stream,
            name=f"{kind} {prefix}{name}{suffix}",
            module=name,
        )
        self._started[part.parameters[0]] = event
        return event
