"""Pipelines made by hand with the public builder: stages of equal kernels, and messages between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from zsim.cost.kernels.kernel import Kernel
from zsim.plan.actions import Action
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.checks import check_plan
from zsim.plan.ops import Group, Memory, Message, Plan
from zsim.specs.experiment.job import Job

PIPELINE = "pipeline"
ON, BACK = 1, -1  # a message to the next stage, and to the one before
BYTES = 2**24  # of an activation or its gradient


class Stage:
    """One stage's rank as a host that issues forwards, backwards and messages. `micro_bytes`: what a forward
    keeps for its backward; `resident_bytes`: what the stage keeps always."""

    def __init__(
        self,
        number: int,
        stages: int,
        groups: Sequence[Group],
        kernels: tuple[Kernel, Kernel],
        *,
        sent_bytes: int = BYTES,
        micro_bytes: int = 0,
    ) -> None:
        self.number, self.stages = number, stages
        self.builder = PlanBuilder(groups)
        self.kernels, self.sent_bytes, self.micro_bytes = kernels, sent_bytes, micro_bytes

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.stages - 1

    def forward(self, micro_batch: int) -> None:
        self.builder.begin(Action("F", self.number, micro_batch))
        self.builder.allocate("activations", self.micro_bytes, owner=f"micro-batch {micro_batch}")
        self.builder.phase = "forward"
        self.builder.kernels(f"F{micro_batch}", [self.kernels[0]])

    def backward(self, micro_batch: int) -> None:
        self.builder.begin(Action("B", self.number, micro_batch))
        self.builder.phase = "backward"
        self.builder.kernels(f"B{micro_batch}", [self.kernels[1]])
        self.builder.free("activations", self.micro_bytes, owner=f"micro-batch {micro_batch}")

    def batch(self, *messages: tuple[str, int]) -> None:
        """`batch_isend_irecv` and its wait: ("send" or "recv", `ON` or `BACK`); those that leave the pipeline
        are left out."""
        kept = [
            Message("send" if direction == "send" else "recv", self.sent_bytes, where)
            for direction, where in messages
            if 0 <= self.number + where < self.stages
        ]
        if kept:
            self._call(kept, PIPELINE, PIPELINE)

    def lone(self, direction: str, where: int) -> None:
        """`isend` or `irecv` and its wait, on the communicator of the two ranks."""
        other = self.number + where
        if 0 <= other < self.stages:
            group = pair_name(min(self.number, other))
            message = Message("send" if direction == "send" else "recv", self.sent_bytes, where)
            self._call([message], group, group)

    def _call(self, messages: Sequence[Message], group: str, stream: str) -> None:
        self.builder.wait_stream(stream, COMPUTE)
        call = self.builder.point_to_point(messages, "bf16", group, stream=stream)
        self.builder.stream_wait(COMPUTE, call)


def pair_name(lower: int) -> str:
    return f"pipeline {lower}-{lower + 1}"


def groups_of(stages: int, replicas: int = 1) -> list[Group]:
    """Ranks stand stage by stage: pipelines, the replicas of a stage, and each pair of neighbours."""
    world = stages * replicas
    rank = np.arange(world).reshape(stages, replicas)
    pairs = [Group(pair_name(low), rank[low : low + 2].T) for low in range(stages - 1)]
    return [
        Group.regular(PIPELINE, world, stages, replicas),
        Group.regular("data", world, replicas),
        *pairs,
    ]


Schedule = Callable[[Stage, int], None]


def one_f_one_b(stage: Stage, micro_batches: int) -> None:
    """Megatron's order, with torch's batches: a forward's send with a backward's receive, and the reverse."""
    warm = min(micro_batches, stage.stages - 1 - stage.number)
    for number in range(warm):
        stage.batch(("recv", BACK))
        stage.forward(number)
        stage.batch(("send", ON))
    if warm < micro_batches:
        stage.batch(("recv", BACK))
    for number in range(micro_batches - warm):
        stage.forward(warm + number)
        stage.batch(("send", ON), ("recv", ON))
        stage.backward(number)
        is_last = warm + number + 1 == micro_batches
        stage.batch(("send", BACK), *([] if is_last else [("recv", BACK)]))
    for number in range(micro_batches - warm, micro_batches):
        stage.batch(("recv", ON))
        stage.backward(number)
        stage.batch(("send", BACK))


def one_f_one_b_alone(stage: Stage, micro_batches: int) -> None:
    """1F1B with lone messages: a forward's send stands before a backward's receive on the stream of the two
    ranks, and so does the neighbour's, the other way round."""
    warm = min(micro_batches, stage.stages - 1 - stage.number)
    for number in range(warm):
        stage.lone("recv", BACK)
        stage.forward(number)
        stage.lone("send", ON)
    for number in range(micro_batches - warm):
        stage.lone("recv", BACK)
        stage.forward(warm + number)
        stage.lone("send", ON)
        stage.lone("recv", ON)
        stage.backward(number)
        stage.lone("send", BACK)
    for number in range(micro_batches - warm, micro_batches):
        stage.lone("recv", ON)
        stage.backward(number)
        stage.lone("send", BACK)


def gpipe(stage: Stage, micro_batches: int) -> None:
    """All forwards, then all backwards, with lone messages."""
    for number in range(micro_batches):
        stage.lone("recv", BACK)
        stage.forward(number)
        stage.lone("send", ON)
    for number in range(micro_batches):
        stage.lone("recv", ON)
        stage.backward(number)
        stage.lone("send", BACK)


def pipeline_plan(
    schedule: Schedule,
    stages: int,
    micro_batches: int,
    kernels: tuple[Kernel, Kernel] | Sequence[tuple[Kernel, Kernel]],
    *,
    replicas: int = 1,
    sent_bytes: int = BYTES,
    micro_bytes: int = 0,
    gradient_bytes: int = 0,
    is_checked: bool = True,
) -> Plan:
    """A plan of one program per stage; `kernels`: forward's and backward's, for all stages or for each;
    `gradient_bytes`: all-reduced among replicas at the end."""
    groups = groups_of(stages, replicas)
    programs = []
    for number in range(stages):
        own = kernels[number] if isinstance(kernels[0], tuple) else kernels
        stage = Stage(number, stages, groups, own, sent_bytes=sent_bytes, micro_bytes=micro_bytes)  # type: ignore[arg-type]
        schedule(stage, micro_batches)
        if gradient_bytes:
            stage.builder.collective("all_reduce", gradient_bytes, "fp32", "data", stream=COMPUTE)
        stage.builder.phase = "optimizer"
        resident = [Memory("parameters", 10**9 * (number + 1))]
        programs.append(stage.builder.program(resident, f"pipeline rank {number}"))
    named = {group.name: group for group in groups}
    plan = Plan("by hand", tuple(programs), np.repeat(np.arange(stages), replicas), named)
    if is_checked:
        check_plan(plan)
    return plan


def without_latency(job: Job) -> Job:
    """The job on a cluster whose messages of no bytes take no time."""
    collectives = job.cluster.collectives
    free = {
        name: costs.model_copy(
            update={
                "base": 0.0, "intra_round": 0.0, "inter_round": 0.0, "network_overhead": 0.0, "ramp": 0.0,
                "network_ramp": 0.0,
            }
        )
        for name, costs in collectives.protocols.items()
    }  # fmt: skip
    update = {"protocols": free}
    cluster = job.cluster.model_copy(update={"collectives": collectives.model_copy(update=update)})
    return replace(job, cluster=cluster)
