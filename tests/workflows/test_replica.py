"""A replica of an inference engine against what must hold of any: tokens, order, and limits."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

import pytest
import simpy

from zsim.cost.inference.iteration import HostRates, IterationPricer, PromptChunk
from zsim.cost.inference.layers import EngineLayout, served_model
from zsim.errors import InputError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.library import Library
from zsim.workflows.rollout.limits import EngineLimits
from zsim.workflows.rollout.replica import Replica
from zsim.workflows.rollout.requests import EngineLog, SampleRequest

GPU = load_cluster("dgx-h100").gpu
HOST = HostRates(1e-3, 1e-5, False)
UNLIMITED = EngineLimits(1024, 16384, 10**6)


def pricer(model: str = "llama-3.1-8b") -> IterationPricer:
    return IterationPricer(served_model(Library().model(model), EngineLayout()), GPU, HOST)


def requests(lengths: Sequence[int], prompt: int = 100, group_size: int = 1) -> list[SampleRequest]:
    return [
        SampleRequest(number, number // group_size, prompt, length) for number, length in enumerate(lengths)
    ]


def run(
    batch: Sequence[SampleRequest], limits: EngineLimits = UNLIMITED, price: IterationPricer | None = None
) -> tuple[float, EngineLog]:
    """Seconds until all requests have ended, and the replica's log."""
    env = simpy.Environment()
    done: list[SampleRequest] = []
    replica = Replica(env, price or pricer(), limits, done.append)
    replica.start()
    for request in batch:
        replica.submit(request)
    env.run()
    assert len(done) == len(batch)
    return max(request.end_seconds for request in done), replica.log


def test_one_request_takes_the_sum_of_its_iterations() -> None:
    """A prompt of 100 tokens gives the first token, and 49 iterations the rest, each with a token more in the
    cache. The price is affine only above a tile of 128 tokens, from which 22 tokens on it is.
    """
    price = pricer()
    seconds, log = run(requests([50], prompt=200), price=price)
    expected = price.seconds(0, 0, [PromptChunk(200)])
    expected += sum(price.seconds(1, 200 + number) for number in range(1, 50))
    assert seconds == pytest.approx(expected, rel=1e-9)
    assert (log.iterations, log.generated_tokens, log.prefill_tokens) == (50, 50, 200)


def test_every_token_is_generated_once() -> None:
    lengths = [5, 300, 17, 900, 44, 1, 250]
    _, log = run(requests(lengths))
    assert log.generated_tokens == sum(lengths)
    assert log.preemptions == 0


def test_equal_requests_end_together() -> None:
    """No tail: a prefill, then as many iterations as tokens, whatever the number of requests."""
    batch = requests([200] * 32)
    _, log = run(batch)
    assert len({request.end_seconds for request in batch}) == 1
    assert log.iterations == 200


def test_a_slot_makes_the_replica_serial() -> None:
    """With one slot the time is the sum of the requests' own times."""
    alone = [run(requests([length]))[0] for length in (40, 70)]
    seconds, _ = run(requests([40, 70]), EngineLimits(1, 16384, 10**6))
    assert seconds == pytest.approx(sum(alone), rel=1e-9)


def test_slots_beyond_what_the_cache_holds_change_nothing() -> None:
    """10 sequences of 160 to 260 tokens in 60 blocks of 16: 3 to 6 at a time."""
    few = EngineLimits(8, 16384, 60)
    many = EngineLimits(64, 16384, 60)
    assert run(requests([100] * 10, prompt=160), few)[0] == run(requests([100] * 10, prompt=160), many)[0]


def test_half_of_the_cache_never_speeds_up() -> None:
    batch = [120, 300, 80, 500, 260, 410]
    full, log = run(requests(batch, prompt=300), EngineLimits(64, 16384, 300))
    half, half_log = run(requests(batch, prompt=300), EngineLimits(64, 16384, 100))
    assert half > full
    assert log.preemptions == 0 < half_log.preemptions
    assert half_log.generated_tokens == sum(batch)
    assert half_log.peak_blocks <= 100


def test_preempted_tokens_are_computed_again_and_counted_so() -> None:
    """Prefilled tokens are those of the prompts and those that were computed twice."""
    batch = requests([120, 300, 80, 500, 260, 410], prompt=300)
    _, log = run(batch, EngineLimits(64, 16384, 100))
    assert log.prefill_tokens + log.cached_tokens >= 6 * 300
    assert log.prefill_tokens - log.recomputed_tokens + log.cached_tokens == 6 * 300


@pytest.mark.parametrize("caches", [True, False])
def test_a_prompt_is_computed_once_for_samples_that_come_later(caches: bool) -> None:
    """Four samples in one slot: the first computes 160 tokens, the others find 9 full blocks of them, since
    the last token is always computed.
    """
    _, log = run(requests([10] * 4, prompt=160, group_size=4), EngineLimits(1, 16384, 10**6, caches))
    assert log.prefill_tokens == (160 + 3 * 16 if caches else 4 * 160)
    assert log.cached_tokens == (3 * 144 if caches else 0)


@pytest.mark.parametrize("caches", [True, False])
def test_samples_that_start_together_compute_the_prompt_once(caches: bool) -> None:
    """In one iteration the first computes 160 tokens, and the others the 16 of the last block alone."""
    limits = EngineLimits(256, 16384, 10**6, caches)
    _, log = run(requests([10] * 4, prompt=160, group_size=4), limits)
    assert log.prefill_tokens == (160 + 3 * 16 if caches else 4 * 160)
    assert log.blocks[-1] == 0
    _, apart = run(requests([10] * 4, prompt=160, group_size=4), replace(limits, shares_at_once=False))
    assert apart.prefill_tokens == 4 * 160  # as SGLang


def test_one_sample_of_each_prompt_shares_nothing() -> None:
    _, log = run(requests([10] * 4, prompt=160), EngineLimits(1, 16384, 10**6))
    assert log.cached_tokens == 0


def test_blocks_are_given_back() -> None:
    batch = requests([50, 70, 30, 90] * 4, prompt=160, group_size=4)
    _, log = run(batch, EngineLimits(3, 16384, 80))
    assert log.blocks[-1] == 0
    assert log.running[-1] == 0


def test_prompts_beyond_the_budget_are_computed_in_pieces() -> None:
    """1,000 tokens with a budget of 256: four iterations before the first token, the last of 232 tokens."""
    _, log = run(requests([1], prompt=1000), EngineLimits(8, 256, 10**6))
    assert (log.iterations, log.prefill_tokens) == (4, 1000)


def test_a_sequence_that_no_cache_holds_is_refused() -> None:
    with pytest.raises(InputError, match=r"needs 63 blocks of the cache, and a replica has 60"):
        run(requests([900], prompt=100), EngineLimits(8, 8192, 60))


def test_a_pause_costs_its_own_time_alone() -> None:
    """Paused in the middle for 3 s, a request ends 3 s later, less the rest of the iteration that ran."""
    alone, _ = run(requests([400]))
    env = simpy.Environment()
    done: list[SampleRequest] = []
    replica = Replica(env, pricer(), UNLIMITED, done.append)
    replica.start()
    replica.submit(requests([400])[0])

    def interrupt() -> Generator[simpy.Event, None, None]:
        yield env.timeout(alone / 2)
        replica.pause()
        yield env.timeout(3.0)
        replica.resume()

    env.process(interrupt())
    env.run()
    iteration = alone / 400
    assert alone + 3.0 - 2 * iteration <= done[0].end_seconds <= alone + 3.0 + 1e-9


def test_a_request_that_arrives_late_joins_after_the_iteration_that_runs() -> None:
    env = simpy.Environment()
    done: list[SampleRequest] = []
    replica = Replica(env, pricer(), UNLIMITED, done.append)
    replica.start()
    first, second = requests([500, 20])
    replica.submit(first)

    def arrive() -> Generator[simpy.Event, None, None]:
        yield env.timeout(1.0)
        replica.submit(second)

    env.process(arrive())
    env.run()
    assert [request.number for request in done] == [1, 0]
    assert 1.0 < second.end_seconds < 1.0 + 40 * 0.012


def test_aborted_requests_keep_their_tokens() -> None:
    env = simpy.Environment()
    replica = Replica(env, pricer(), UNLIMITED, lambda request: None)
    replica.start()
    for request in requests([500, 600]):
        replica.submit(request)
    env.run(until=1.0)
    taken = replica.abort()
    assert [0 < request.generated < request.response_tokens for request in taken] == [True, True]
    assert replica.in_flight == 0


def test_kernels_launched_one_by_one_are_never_faster_than_graphs() -> None:
    graphs, _ = run(requests([50] * 4))
    eager = IterationPricer(
        served_model(Library().model("llama-3.1-8b"), EngineLayout()), GPU, HOST, uses_graphs=False,
        launch_seconds=5e-5,
    )  # fmt: skip
    assert run(requests([50] * 4), price=eager)[0] > graphs


def test_an_engine_that_reserves_answers_never_evicts() -> None:
    """A cache of 100 blocks holds four sequences of 100 + 300 tokens, 25 blocks each, from the start on.
    Without the promise as many of twenty prompts (7 blocks) start as fit, and sequences are evicted later.
    """
    batch = [requests([300] * 20) for _ in range(2)]
    _, evicting = run(batch[0], EngineLimits(1024, 16384, 100, prefix_caching=False))
    _, reserving = run(batch[1], EngineLimits(1024, 16384, 100, False, reserves_responses=True))
    assert evicting.preemptions > 0
    assert reserving.preemptions == 0
    assert max(reserving.running) == 4
    assert reserving.generated_tokens == 20 * 300
    assert reserving.prefill_tokens == 20 * 100


def test_a_static_batch_ends_before_the_next_starts() -> None:
    """Batches of two: 50 iterations for the longer of the first, and 10 for both of the second. With
    continuous batching those of 10 take the place that is free.
    """
    bounds = EngineLimits(2, 16384, 10**6)
    static, continuous = (
        run(requests([10, 50, 10, 10]), replace(bounds, has_static_batches=is_static))[1]
        for is_static in (True, False)
    )
    assert (static.iterations, continuous.iterations) == (60, 50)
