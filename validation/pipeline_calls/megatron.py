"""Megatron-Core's `forward_backward_pipelining_*`, with everything but its own three files replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from validation.pipeline_calls.stubs import real_modules

_PACKAGE = "megatron.core.pipeline_parallel"


@dataclass(frozen=True)
class Case:
    """One configuration; the names of the settings are Megatron's own."""

    ranks: int
    virtual: int
    micro_batches: int
    microbatch_group_size_per_vp_stage: int | None = None
    overlap_p2p_comm: bool = True
    overlap_p2p_comm_warmup_flush: bool = False
    align_grad_reduce: bool = False
    align_param_gather: bool = False

    @property
    def name(self) -> str:
        """The configuration as text, settings that are on by their names."""
        group = self.microbatch_group_size_per_vp_stage
        flags = [
            "overlap_p2p_comm",
            "overlap_p2p_comm_warmup_flush",
            "align_grad_reduce",
            "align_param_gather",
        ]
        on = [flag for flag in flags if getattr(self, flag)]
        return " ".join([f"p{self.ranks} v{self.virtual} m{self.micro_batches} n{group or self.ranks}", *on])


class Tensor:
    """Stands for a tensor; a received one learns its name from the computation that uses it."""

    def __init__(self, name: str = "") -> None:
        self.name = name


@dataclass
class Event:
    """One line of a log, whose tensors may not have their names yet."""

    verb: str
    tensors: Sequence[Tensor] = ()
    place: str = ""

    def __str__(self) -> str:
        assert all(one.name for one in self.tensors), "a receive that no computation used"
        return " ".join([self.verb, *(one.name for one in self.tensors)]).strip() + self.place


class _Shim:
    """A module some of whose names are replaced."""

    def __init__(self, behind: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


class _Group:
    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


def _settings(case: Case) -> Any:
    """Megatron's configuration; what it does not name is None."""
    is_interleaved = case.virtual > 1

    class Settings(SimpleNamespace):
        def __getattr__(self, _: str) -> None:
            return None

    overlap = case.overlap_p2p_comm and is_interleaved
    return Settings(
        virtual_pipeline_model_parallel_size=case.virtual if is_interleaved else None,
        microbatch_group_size_per_vp_stage=case.microbatch_group_size_per_vp_stage or case.ranks,
        overlap_p2p_comm=overlap,
        overlap_p2p_comm_warmup_flush=case.overlap_p2p_comm_warmup_flush,
        batch_p2p_comm=not overlap,
        batch_p2p_sync=True,
        deallocate_pipeline_outputs=True,
        pipeline_dtype="bf16",
        hidden_size=8,
    )


class Recorder:
    """The replaced parts of Megatron for one rank: what they do is a line in `log`."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.log: list[Event] = []

    def stage(self, chunk: int | None) -> int:
        return (chunk or 0) * self.case.ranks + self.rank

    def forward_step(
        self, *given: Any, current_microbatch: int, vp_stage: int | None = None, **_: Any
    ) -> Any:
        received = given[4]
        name = f"{self.stage(vp_stage)}F{current_microbatch}"
        self._name(received, name, "RECV_F")
        self.log.append(Event(name))
        output = Tensor(name.replace("F", "SEND_F"))
        return ([output] if isinstance(received, list) else output), 0

    def backward_step(self, received: Any, output: Any, gradient: Any, *_: Any) -> Any:
        done = output[0] if isinstance(output, list) else output
        name = done.name.replace("SEND_F", "B")
        self._name(gradient, name, "RECV_B")
        self.log.append(Event(name))
        sent = Tensor(name.replace("B", "SEND_B"))
        return [sent] if isinstance(received, list) else sent

    def _name(self, received: Any, user: str, kind: str) -> None:
        tensor = received[0] if isinstance(received, list) else received
        if tensor is not None:
            assert tensor.name == "", f"{user} uses what {tensor.name} names already"
            tensor.name = user.replace(kind[-1], kind)

    def _request(self, tensors: Sequence[Tensor], place: str = "") -> Any:
        return SimpleNamespace(wait=lambda: self.log.append(Event("wait", tensors, place)))

    def alone(self, verb: str) -> Callable[..., Any]:
        def post(tensor: Tensor, *, group: Any, **_: Any) -> Any:
            place = "/world" if group == "world" else ""
            self.log.append(Event(verb, [tensor], place))
            return self._request([tensor], place)

        return post

    def batch(self, tensors: Sequence[Tensor]) -> list[Any]:
        self.log.append(Event("batch", tensors))
        return [self._request(tensors)]

    def synchronize(self) -> None:
        self.log.append(Event("synchronize"))

    def told(self, verb: str) -> list[Callable[..., None]]:
        def call(chunk: int) -> Callable[..., None]:
            return lambda *_: self.log.append(Event(f"{self.stage(chunk)}{verb}"))

        return [call(chunk) for chunk in range(self.case.virtual)]

    def torch(self) -> Any:
        distributed = _Shim(
            torch.distributed,
            P2POp=lambda _operation, tensor, *_: tensor,
            isend=self.alone("isend"),
            irecv=self.alone("irecv"),
            batch_isend_irecv=self.batch,
            get_backend=lambda _: "nccl",
            get_global_rank=lambda _, rank: rank,
            group=SimpleNamespace(WORLD="world"),
        )
        cuda = _Shim(torch.cuda, synchronize=self.synchronize, current_device=lambda: 0)
        return _Shim(
            torch,
            distributed=distributed,
            cuda=cuda,
            empty=lambda *_, **__: Tensor(),
            zeros=lambda *_, **__: 0,
        )


def modules(root: Path) -> tuple[Any, Any]:
    """Megatron's modules `schedules` and `p2p_communication` of the `megatron` folder in `root`."""

    def unchanged(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda function: function

    schedules, p2p, _ = real_modules(
        root,
        [f"{_PACKAGE}.{name}" for name in ("schedules", "p2p_communication", "utils")],
        {
            "get_pg_rank": lambda group: group.rank(),
            "get_pg_size": lambda group: group.size(),
            "get_model_config": lambda model: model.config,
            "nvtx_decorator": unchanged,
            "trace_fn": unchanged,
            "ProcessGroupCollection": SimpleNamespace,
            "MultiModuleProcessGroupCollection": Tensor,
            "MultiModulePipelineCommunicator": Tensor,
        },
    )
    return schedules, p2p


def version(root: Path) -> str:
    """Megatron-Core's version, from its `package_info.py`."""
    text = root.joinpath("megatron", "core", "package_info.py").read_text()
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))


def recorded(root: Path) -> dict[str, list[str]]:
    """The log of every rank, its lines joined by ", ", by the name of the configuration."""
    schedules, p2p = modules(root)
    return {case.name: record(schedules, p2p, case) for case in cases()}


def record(schedules: Any, p2p: Any, case: Case) -> list[str]:
    """The log of every rank, its lines joined by ", "."""
    logs = []
    for rank in range(case.ranks):
        recorder, settings = Recorder(case, rank), _settings(case)
        shim = recorder.torch()
        schedules.torch = p2p.torch = shim
        p2p.dist = shim.distributed
        schedules.forward_step, schedules.backward_step = recorder.forward_step, recorder.backward_step
        schedules.deallocate_output_tensor = lambda *_: None
        is_interleaved = case.virtual > 1
        if case.align_grad_reduce:
            reduces = recorder.told("REDUCE_GRAD")
            settings.grad_sync_func = reduces if is_interleaved else reduces[0]
        if case.align_param_gather:
            settings.param_sync_func = recorder.told("UNSHARD")
        group = _Group(rank, case.ranks)
        one = _Group(0, 1)
        chunks = [_model(settings) for _ in range(case.virtual)]
        function = "with" if is_interleaved else "without"
        getattr(schedules, f"forward_backward_pipelining_{function}_interleaving")(
            forward_step_func=None,
            data_iterator=[None] * case.virtual,
            model=chunks,
            num_microbatches=case.micro_batches,
            seq_length=8,
            micro_batch_size=1,
            p2p_communicator=p2p.P2PCommunicator(group, settings),
            pg_collection=SimpleNamespace(tp=one, cp=one, embd=None, pos_embd=None, pp=group, dp_cp=one),
        )
        logs.append(", ".join(str(event) for event in recorder.log))
    return logs


def _model(settings: Any) -> Any:
    model: Any = torch.nn.Module()
    model.config = settings
    return model


def cases() -> Iterator[Case]:
    """The recorded configurations."""
    for ranks, micro_batches in ((2, 1), (2, 4), (4, 2), (4, 7)):
        yield Case(ranks, 1, micro_batches, align_grad_reduce=True)
    for ranks, virtual, micro_batches, group in (
        (2, 2, 2, None), (2, 3, 4, None), (3, 2, 8, 5), (4, 2, 4, None), (4, 3, 8, None), (4, 2, 8, 8),
        (4, 2, 10, 6),
    ):  # fmt: skip
        yield Case(ranks, virtual, micro_batches, group, align_grad_reduce=True, align_param_gather=True)
        yield Case(ranks, virtual, micro_batches, group, overlap_p2p_comm_warmup_flush=True)
        if ranks > 2:
            yield Case(ranks, virtual, micro_batches, group, overlap_p2p_comm=False)
