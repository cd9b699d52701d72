"""A replica of an inference engine on the clock: continuous batching over a paged cache.

An iteration gives every running sequence one token. What is left of its budget of tokens goes to prompts
that wait, in their order, as far as there are slots and blocks (vLLM 0.24 `v1/core/sched/scheduler.py`
`schedule`). If a sequence needs a block and none is free, the one that was admitted last loses all of its
blocks and waits at the head of the queue, to be computed again (`_preempt_request`).

[Note: iterations at once] Between two changes of the batch every iteration is like the one before with one
more token in each cache, and its time is affine in the tokens of the caches. So the time of n iterations is
n times the mean of the first and the last one's, and the clock stops only where a sequence ends, a block is
missing, or somebody interrupts.

[Note: reserved answers] Engines that promise never to evict start a request only when the blocks of its
longest answer are free (TensorRT-LLM `llmapi/llm_args.py`, `CapacitySchedulerPolicy.GUARANTEED_NO_EVICT`, the
default).

[Note: shared prompts] With prefix caching the full blocks of a prompt are kept once for all requests of its
group on a replica, and later requests read them there. vLLM enters them into its table when it schedules
them, so that requests of a group that start in one iteration compute the prompt once (0.11
v1/core/kv_cache_manager.py `allocate_slots`). TensorRT-LLM lets the others wait for an iteration
(capacityScheduler.cpp `beneficialToSkip`), which is not told apart. SGLang does so under its policy "lpm"
alone (srt/managers/schedule_policy.py), and under its default each computes the prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator
from typing import Any, NamedTuple

import numpy as np
import simpy
from numpy.typing import NDArray

from zsim.arrays import Ints
from zsim.cost.inference.iteration import IterationPricer, PromptChunk
from zsim.errors import InputError
from zsim.workflows.rollout.limits import BLOCK_TOKENS, EngineLimits, blocks_for
from zsim.workflows.rollout.requests import EngineLog, SampleRequest

_Owner = tuple[str, int]  # "request" or "group", and its number


class _Remnant(NamedTuple):
    """Blocks that were given back with what they hold. Free blocks are taken in the order in which they were
    given back, of a sequence the last tokens first.
    """

    blocks: int
    first_taken: int
    """The number of blocks taken in all when the first of these is."""

    def left(self, num_taken: int) -> int:
        """Blocks that still hold it when `num_taken` have been taken in all."""
        return max(0, self.blocks - max(0, num_taken - self.first_taken))


class Replica:
    """One engine, whose loop is a process that never ends by itself."""

    def __init__(
        self,
        env: simpy.Environment,
        pricer: IterationPricer,
        limits: EngineLimits,
        finished: Callable[[SampleRequest], None],
    ) -> None:
        self.env, self.pricer, self.limits = env, pricer, limits
        self.log = EngineLog()
        self.process: simpy.Process | None = None
        self._finished = finished
        self._waiting: deque[SampleRequest] = deque()
        self._decoding: NDArray[np.object_] = np.empty(0, dtype=object)  # requests
        self._lengths: Ints = np.zeros(0, dtype=np.int64)  # tokens in the cache of each that decodes
        self._remaining: Ints = np.zeros(0, dtype=np.int64)  # tokens that each still gets
        self._partial: SampleRequest | None = None  # its prompt is computed in several iterations
        self._prefixes: dict[int, int] = {}  # blocks of a group's prompt that are in the cache
        self._prefix_users: dict[int, int] = {}
        self._used_blocks = 0
        self._taken_blocks = 0  # since the start, whether or not they were given back
        self._promised_blocks = 0  # that running requests will still take, where the engine reserves them
        self._is_prefix_valid: set[int] = set()  # groups whose prompt the newest weights have computed
        self._remnants: dict[_Owner, _Remnant] = {}
        self._arrival = env.event()
        self._is_stretching = False
        self._admits = True
        self._resumption: simpy.Event | None = None
        self._stop = env.event()
        self._is_idle = False

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._decoding) + (self._partial is not None)

    @property
    def in_flight(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + self.num_running

    def submit(self, request: SampleRequest) -> None:
        """Queue a request.

        Raises InputError if its tokens would not fit in the whole cache.
        """
        tokens = request.prompt_tokens + request.response_tokens
        if blocks_for(tokens) > self.limits.cache_blocks:
            raise InputError(
                f"rl.rollout: a sequence of {tokens:,} tokens needs {blocks_for(tokens):,} blocks of the "
                f"cache, and a replica has {self.limits.cache_blocks:,}; expected more GPUs to a replica, a "
                "higher gpu_memory_utilization or shorter responses"
            )
        if request.start_seconds is None:
            request.start_seconds = self.env.now
        self._waiting.append(request)
        if not self._arrival.triggered:
            self._arrival.succeed()
        if self.num_running < self.limits.max_num_seqs:
            self._interrupt()

    def start(self) -> simpy.Process:
        """Start the engine's loop."""
        self.process = self.env.process(self._run())
        return self.process

    def abort(self) -> list[SampleRequest]:
        """Take back all requests, whose generated tokens stay theirs, and free the cache. No iteration may
        run, see `pause`.
        """
        self._update_requests()
        partial = [] if self._partial is None else [self._partial]
        requests = [*self._decoding, *partial, *self._waiting]
        for request in requests:
            request.computed = 0
        self._keep(np.zeros(len(self._decoding), dtype=bool))
        self._waiting.clear()
        self._partial = None
        self._used_blocks = self._promised_blocks = 0
        self._prefixes.clear()
        self._prefix_users.clear()
        self.reset_cache()
        self._record()
        return requests

    def cancel(self, requests: Collection[SampleRequest]) -> None:
        """Let go of those of these requests that wait or run here. No iteration may run, see `pause`."""
        assert not self.limits.reserves_responses, "promised blocks are not given back"
        self._update_requests()
        is_kept = np.array([request not in requests for request in self._decoding], dtype=bool)
        released = [*self._decoding[~is_kept]]
        self._keep(is_kept)
        if self._partial in requests:
            released.append(self._partial)
            self._partial = None
        for request in released:
            self._release(request)
        self._waiting = deque(request for request in self._waiting if request not in requests)
        self._record()

    def pause(self) -> simpy.Event:
        """Stop after the iteration that runs, until `resume`. Returns the event that it has ended."""
        if self._resumption is None:
            self._resumption, self._stop = self.env.event(), self.env.event()
            if self._is_idle:
                self._stop.succeed()
            self._interrupt()
        return self._stop

    def resume(self) -> None:
        """Go on after a `pause`."""
        if self._resumption is not None:
            self._resumption.succeed()
            self._resumption = None

    def hold(self) -> None:
        """Start none of the requests that wait, until `admit`."""
        self._admits = False

    def admit(self) -> None:
        """Start requests again after a `hold`."""
        self._admits = True
        if not self._arrival.triggered:
            self._arrival.succeed()
        self._interrupt()

    def reset_cache(self) -> None:
        """Forget all prompts: new weights make what was computed with the old ones useless for others."""
        self._remnants.clear()
        self._is_prefix_valid.clear()

    def _interrupt(self) -> None:
        """End the iterations that run at once after the one that runs now. Once is enough."""
        if self._is_stretching:
            assert self.process is not None
            self._is_stretching = False
            self.process.interrupt()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            if self._resumption is not None:
                if not self._stop.triggered:
                    self._stop.succeed()
                yield self._resumption
                continue
            if not self.num_running and not (self._waiting and self._admits):
                self._arrival = self.env.event()
                self._is_idle = True
                yield self._arrival
                self._is_idle = False
                continue
            is_short = self._make_room()
            chunks = [] if is_short else self._schedule_prompts()
            if chunks:
                yield from self._run_mixed(chunks)
            elif len(self._decoding):
                yield from self._run_decodes()

    # ---- Scheduling ----------------------------------------------------------------------------------------

    def _schedule_prompts(self) -> list[tuple[SampleRequest, PromptChunk]]:
        """The chunks of the next iteration. Their requests have slots from then on."""
        budget = self.limits.max_num_batched_tokens - len(self._decoding)
        chunks: list[tuple[SampleRequest, PromptChunk]] = []
        if self.limits.has_static_batches and len(self._decoding):
            return chunks
        if self._partial is not None:
            chunks.append(self._next_chunk(self._partial, budget))
            budget -= chunks[-1][1].new_tokens
            self._partial = None
        while self._admits and self._waiting and budget > 0:
            if len(self._decoding) + len(chunks) >= self.limits.max_num_seqs:
                break
            request = self._waiting[0]
            if not self._admit(request):
                break
            self._waiting.popleft()
            chunks.append(self._next_chunk(request, budget))
            budget -= chunks[-1][1].new_tokens
        return chunks

    def _next_chunk(self, request: SampleRequest, budget: int) -> tuple[SampleRequest, PromptChunk]:
        """The tokens of a request that the next iteration computes. With its end others find its prompt."""
        chunk = PromptChunk(min(budget, request.length - request.computed), request.computed)
        if self.limits.shares_at_once and request.computed + chunk.new_tokens == request.length:
            self._keep_prefix(request)
        return request, chunk

    def _make_room(self) -> bool:
        """Preempt sequences until each of the others can have its next token. Returns whether any was."""
        is_short = False
        while len(self._decoding) > 1 and self._next_blocks() > self.limits.cache_blocks - self._used_blocks:
            self._preempt()
            is_short = True
        return is_short

    def _next_blocks(self) -> int:
        """Blocks that the next token of all sequences needs."""
        return int(np.count_nonzero(self._lengths % BLOCK_TOKENS == 0))

    def _admit(self, request: SampleRequest) -> bool:
        """Whether the cache holds the request's tokens and the next, which are then taken."""
        shared = self._shared_blocks(request)
        reserve = self._next_blocks() + blocks_for(request.length + 1) - blocks_for(request.length)
        needed = blocks_for(request.length) - shared
        growth = 0
        if self.limits.reserves_responses:
            tokens = request.prompt_tokens + request.response_tokens
            growth = blocks_for(tokens) - blocks_for(request.length)
            reserve = self._promised_blocks + growth
        if self._used_blocks + needed + reserve > self.limits.cache_blocks:
            return False
        self._promised_blocks += growth
        cached = max(shared, self._remnant(request))
        self._used_blocks += needed
        self._taken_blocks += blocks_for(request.length) - cached
        request.computed = cached * BLOCK_TOKENS
        request.shared_blocks = shared
        if request.preemptions == 0:
            self.log.cached_tokens += request.computed
        self._prefix_users[request.group] = self._prefix_users.get(request.group, 0) + 1
        return True

    def _shared_blocks(self, request: SampleRequest) -> int:
        """Blocks of the request's prompt that another of its group holds. The last token is always
        computed.
        """
        if request.group not in self._is_prefix_valid:
            return 0
        return min(self._prefixes.get(request.group, 0), (request.length - 1) // BLOCK_TOKENS)

    def _remnant(self, request: SampleRequest) -> int:
        """Blocks of the request, or of its prompt, that were given back and that nobody has taken since."""
        most = (request.length - 1) // BLOCK_TOKENS
        request_remnant = self._remnants.pop(("request", request.number), None)
        prompt = self._remnants.get(("group", request.group)) if self.limits.prefix_caching else None
        left = [
            remnant.left(self._taken_blocks) for remnant in (request_remnant, prompt) if remnant is not None
        ]
        return min(most, max(left, default=0))

    # ---- Iterations ----------------------------------------------------------------------------------------

    def _run_mixed(
        self, chunks: list[tuple[SampleRequest, PromptChunk]]
    ) -> Generator[simpy.Event, Any, None]:
        """One iteration of prompts beside sequences that decode."""
        seconds = self.pricer.seconds(
            len(self._decoding), int(self._lengths.sum()), [chunk for _, chunk in chunks]
        )
        self._record(len(chunks))
        yield from self._sleep(seconds)
        self.log.iterations += 1
        starting = []
        for request, chunk in chunks:
            self.log.prefill_tokens += chunk.new_tokens
            if request.preemptions:
                self.log.recomputed_tokens += chunk.new_tokens
            request.computed += chunk.new_tokens
            if request.computed < request.length:
                self._partial = request
            else:
                self._keep_prefix(request)
                request.first_seconds = request.first_seconds or self.env.now
                starting.append(request)
        self._join(starting)
        self._advance(1)

    def _run_decodes(self) -> Generator[simpy.Event, Any, None]:
        """As many iterations as are alike, see [Note: iterations at once]."""
        free = self.limits.cache_blocks - self._used_blocks
        count = _iterations_until_full(self._lengths, free, int(self._remaining.min()))
        sequences, context = len(self._decoding), int(self._lengths.sum())
        first = self.pricer.seconds(sequences, context)
        last = self.pricer.seconds(sequences, context + sequences * (count - 1))
        self._record()
        start = self.env.now
        self._is_stretching = True
        try:
            yield self.env.timeout(count * (first + last) / 2)
            done = count
            self.log.busy_seconds += self.env.now - start
        except simpy.Interrupt:
            done, rest = _iterations_done(self.env.now - start, count, first, last)
            self.log.busy_seconds += self.env.now - start
            yield from self._sleep(rest)
        self._is_stretching = False
        self.log.iterations += done
        self._advance(done)

    def _sleep(self, seconds: float) -> Generator[simpy.Event, Any, None]:
        """Let an iteration end, which nothing interrupts."""
        self.log.busy_seconds += seconds
        yield self.env.timeout(seconds)

    def _join(self, requests: list[SampleRequest]) -> None:
        """Let requests decode from the next token on."""
        joining = np.empty(len(requests), dtype=object)
        joining[:] = requests
        self._decoding = np.concatenate((self._decoding, joining))
        lengths = [request.length for request in requests]
        remaining = [request.remaining for request in requests]
        self._lengths = np.concatenate((self._lengths, np.array(lengths, dtype=np.int64)))
        self._remaining = np.concatenate((self._remaining, np.array(remaining, dtype=np.int64)))

    def _advance(self, count: int) -> None:
        """Give each sequence that decodes `count` tokens, and end those that have all of theirs."""
        new_blocks = int(_blocks(self._lengths + count).sum() - _blocks(self._lengths).sum())
        self._used_blocks += new_blocks
        self._taken_blocks += new_blocks
        if self.limits.reserves_responses:
            self._promised_blocks -= new_blocks
        self._lengths = self._lengths + count
        self._remaining = self._remaining - count
        self.log.generated_tokens += count * len(self._decoding)
        self.log.peak_blocks = max(self.log.peak_blocks, self._used_blocks)
        has_ended = self._remaining <= 0
        if not has_ended.any():
            return
        ended: list[SampleRequest] = []
        for index in np.flatnonzero(has_ended):
            request: SampleRequest = self._decoding[index]
            ended.append(request)
            self._update(request, int(index))
            request.end_seconds = self.env.now
            ahead = self.limits.cache_blocks - self._used_blocks
            self._release(request)
            if request.later_turns:
                self._leave_remnant(request, ahead)
        self._keep(~has_ended)
        self._record()
        for request in ended:
            self._finished(request)

    def _update(self, request: SampleRequest, index: int) -> None:
        """Bring a request up to date with the arrays."""
        request.generated = request.response_tokens - int(self._remaining[index])
        request.computed = request.length

    def _update_requests(self) -> None:
        for index, request in enumerate(self._decoding):
            self._update(request, index)

    def _keep(self, is_kept: NDArray[np.bool_]) -> None:
        """Let only these sequences go on."""
        self._decoding = self._decoding[is_kept]
        self._lengths, self._remaining = self._lengths[is_kept], self._remaining[is_kept]

    def _preempt(self) -> None:
        """Take all blocks of the sequence that was admitted last."""
        request: SampleRequest = self._decoding[-1]
        self._update(request, len(self._decoding) - 1)
        is_kept = np.ones(len(self._decoding), dtype=bool)
        is_kept[-1] = False
        self._keep(is_kept)
        request.preemptions += 1
        self.log.preemptions += 1
        ahead = self.limits.cache_blocks - self._used_blocks
        self._release(request)
        self._leave_remnant(request, ahead)
        request.computed = 0
        self._waiting.appendleft(request)

    def _leave_remnant(self, request: SampleRequest, ahead: int) -> None:
        """Remember the blocks of a request that comes back, `ahead` of which others are taken first."""
        if self.limits.prefix_caching:
            blocks = request.computed // BLOCK_TOKENS
            self._remnants["request", request.number] = _Remnant(blocks, self._taken_blocks + ahead)

    # ---- Blocks --------------------------------------------------------------------------------------------

    def _keep_prefix(self, request: SampleRequest) -> None:
        """Give the full blocks of a prompt to its group, if the group has none."""
        if self.limits.prefix_caching and request.group not in self._prefixes:
            request.shared_blocks = self._prefixes[request.group] = request.prompt_tokens // BLOCK_TOKENS
            self._is_prefix_valid.add(request.group)

    def _release(self, request: SampleRequest) -> None:
        """Give the request's blocks back. Those of its group stay as long as one of the group runs."""
        self._used_blocks -= blocks_for(request.length) - request.shared_blocks
        request.shared_blocks = 0
        users = self._prefix_users[request.group] = self._prefix_users[request.group] - 1
        if not users and request.group in self._prefixes:
            ahead = self.limits.cache_blocks - self._used_blocks
            blocks = self._prefixes.pop(request.group)
            self._used_blocks -= blocks
            if request.group in self._is_prefix_valid:
                self._is_prefix_valid.remove(request.group)
                self._remnants["group", request.group] = _Remnant(blocks, self._taken_blocks + ahead)

    def _record(self, starting: int = 0) -> None:
        self.log.times.append(self.env.now)
        self.log.running.append(self.num_running + starting)
        self.log.blocks.append(self._used_blocks)


def _blocks(lengths: Ints) -> Ints:
    blocks: Ints = -(-lengths // BLOCK_TOKENS)
    return blocks


def _iterations_until_full(lengths: Ints, free: int, most: int) -> int:
    """The largest number of iterations, at most `most`, whose tokens fit into `free` more blocks."""
    before = -(-lengths // BLOCK_TOKENS)

    def needed(count: int) -> int:
        return int((-(-(lengths + count) // BLOCK_TOKENS) - before).sum())

    if needed(most) <= free:
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= free else (low, middle)
    return low


def _iterations_done(elapsed: float, count: int, first: float, last: float) -> tuple[int, float]:
    """The number of iterations that have begun after `elapsed` seconds, and the seconds until the last of
    them ends.
    """
    slope = (last - first) / (count - 1) if count > 1 else 0.0

    def end_of(number: int) -> float:
        return number * first + slope * number * (number - 1) / 2

    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if end_of(middle) < elapsed else (low, middle)
    return high, max(0.0, end_of(high) - elapsed)
