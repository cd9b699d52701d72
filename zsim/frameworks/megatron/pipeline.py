"""Steps of Megatron-Core's 1F1B without interleaving. `pipeline_interleaved.py` has the interleaved one.

Source: `forward_backward_pipelining_without_interleaving` of Megatron-Core 0.16.1
`core/pipeline_parallel/schedules.py`, `P2PCommunicator` of `core/pipeline_parallel/p2p_communication.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.plan.actions import Action, MessageCall, Step


@dataclass(frozen=True, slots=True)
class MegatronPipeline:
    """Settings of Megatron-Core that change its steps. The defaults are the command line's."""

    group_size: int | None = None
    """`microbatch_group_size_per_vp_stage`, None for the number of pipeline ranks."""
    overlaps_p2p: bool = True
    """Interleaved only: `--no-overlap-p2p-communication` turns it off."""
    flushes_ahead: bool = False
    """`--overlap-p2p-communication-warmup-flush`."""
    waits_sends: bool = True
    """From core 0.18 on the send of a forward is waited for at once. Before, it was not waited for until the
    next (commit 260cba71).
    """
    aligns_grad_reduce: bool = False
    """`overlap_grad_reduce` with `align_grad_reduce`: the gradients of a chunk start to be reduced at a step
    of the schedule instead of in the chunk's own last backward.
    """
    aligns_param_gather: bool = False
    """`overlap_param_gather` with `align_param_gather`, interleaved only: the parameters of a chunk start to
    be gathered at a step of the schedule.
    """
    pairs: bool = False
    """`--overlap-moe-expert-parallel-comm`: a forward and a backward run side by side, and one forward more
    is ahead (`get_pp_rank_microbatches` of Megatron-LM d98e8a64).
    """
    delays_weights: bool = False
    """`--delay-wgrad-compute`: of pairs, the gradients of weights are issued separately."""
    scatters_messages: bool = False
    """Without sequence parallelism, tensor-parallel ranks send a part of every message each."""
    synchronizes_timers: bool = False
    """Timers wait for the device around every forward, backward and exchange of messages."""

    @classmethod
    def of(cls, config: MegatronConfig) -> MegatronPipeline:
        """The settings of a strategy."""
        return cls(
            group_size=config.micro_batch_group,
            overlaps_p2p=config.overlap_p2p,
            flushes_ahead=config.overlap_p2p_warmup_flush,
            waits_sends=config.waits_sends,
            aligns_grad_reduce=config.overlap_grad_reduce and config.align_grad_reduce,
            aligns_param_gather=config.overlap_param_gather and config.align_param_gather,
            pairs=config.overlap_expert_parallel,
            delays_weights=config.delay_wgrad_compute,
            scatters_messages=config.scatters_messages,
            synchronizes_timers=config.synchronizes_timers,
        )


def one_forward_one_backward_steps(
    ranks: int, micro_batches: int, settings: MegatronPipeline
) -> list[list[Step]]:
    """The steps of each rank. Each call is one batch, after which the host waits (`batch_p2p_sync`). A send
    goes with the receive from the same neighbour between the first and the last forward that a backward
    follows at once. With `aligns_grad_reduce` all ranks but the first reduce after their last backward's
    send.
    """
    return [_steps(ranks, rank, micro_batches, settings) for rank in range(ranks)]


def _steps(ranks: int, rank: int, micro_batches: int, settings: MegatronPipeline) -> list[Step]:
    num_warmup = min(ranks - 1 - rank, micro_batches)
    is_first, is_last = rank == 0, rank == ranks - 1
    steps: list[Step] = []

    def exchange(*messages: Action) -> None:
        """One batch of the messages that have a neighbour: `_batched_p2p_ops` orders them by neighbour, the
        previous rank's first, and a send before a receive."""
        sent_or_received = [
            message
            for message in messages
            if not (is_first if message.kind in ("RECV_F", "SEND_B") else is_last)
        ]
        if sent_or_received:
            steps.append(MessageCall(tuple(sent_or_received), is_batched=True, waits="host"))

    for number in range(num_warmup):
        exchange(Action("RECV_F", rank, number))
        steps.append(Action("F", rank, number))
        exchange(Action("SEND_F", rank, number))
    if num_warmup < micro_batches:
        exchange(Action("RECV_F", rank, num_warmup))
    for number in range(micro_batches):
        forward = number + num_warmup
        if forward < micro_batches:
            steps.append(Action("F", rank, forward))
            exchange(Action("SEND_F", rank, forward), Action("RECV_B", rank, number))
        else:
            exchange(Action("RECV_B", rank, number))
        steps.append(Action("B", rank, number))
        if forward + 1 < micro_batches:
            exchange(Action("SEND_B", rank, number), Action("RECV_F", rank, forward + 1))
        else:
            exchange(Action("SEND_B", rank, number))
    if settings.aligns_grad_reduce and not is_first:
        steps.append(Action("REDUCE_GRAD", rank))
    return steps
