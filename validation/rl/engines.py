"""Predict runs of an inference engine alone: its throughput, and the time between two tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from validation.rl.serving import ServingResult, serve
from validation.rl.table import RlRow
from validation.rl.trtllm_bench import BENCH_GRAPHS, bench_limits
from validation.rl.words import cluster_of, dtype_of, model_of
from zsim.cost.inference.iteration import EAGER_KERNEL_SECONDS, GRAPH_SIZES, IterationPricer
from zsim.cost.inference.layers import EngineLayout, served_model
from zsim.errors import NotSimulatedError
from zsim.specs.library import Library
from zsim.workflows.rollout.engine import engine_of
from zsim.workflows.rollout.limits import EngineLimits, engine_limits
from zsim.workflows.rollout.requests import SampleRequest

_REQUESTS = 600  # of a run that does not say how many, and of open arrivals
_MAX_REQUESTS = 3000
_SHARED_PROMPTS = 44
"""Prompts of the workloads with shared prefixes, which come again and again: 11 system prompts of 100 tokens
with 4 users' questions of 466 each (inference-sim/sim-to-real-accuracy-validation, the profile in the tests
of its `experiment.ground_truth`)."""
_CONTEXT = 1400  # tokens of a sequence where nothing is said


@dataclass(frozen=True)
class EnginePrediction:
    """What an engine is predicted to do."""

    tokens_per_second: float
    """Generated tokens a second, of all GPUs."""
    seconds_per_token: float
    """Mean time between two tokens of a request."""


def predict_engine(row: RlRow, library: Library) -> EnginePrediction:
    """The engine of a row. Raises NotSimulatedError or InputError for one that is not simulated."""
    cluster = library.cluster(cluster_of(row.text("gpu")))
    layout = _layout(row)
    spec = library.model(model_of(row.text("model")))
    model = served_model(spec, layout)
    engine = engine_of(row.text("engine"), row.text("version"))
    sequences, tokens = engine.max_num_seqs, engine.max_num_batched_tokens
    is_bench = engine.name == "trtllm" and row.has_word(r"offline|queued", "concurrency_kind")
    if is_bench:
        sequences, tokens = bench_limits(row, spec, layout, cluster.gpu)
    limits = _limits(row, engine_limits(
        model,
        cluster.gpu,
        _utilization(row),
        row.count("max_num_seqs") or sequences,
        row.count("max_num_batched_tokens") or tokens,
        prefix_caching=not row.has_word(r"off|no reuse|false", "prefix_caching"),
        reserves_responses=engine.reserves_responses,
        shares_at_once=engine.shares_at_once,
    ))  # fmt: skip
    pricer = IterationPricer(
        model,
        cluster.gpu,
        engine.host,
        max_graph=limits.max_num_seqs // layout.data
        if is_bench
        else min(512, 2 * limits.max_num_seqs // layout.data),
        graph_sizes=BENCH_GRAPHS if is_bench else GRAPH_SIZES,
        launch_seconds=cluster.host.seconds_per_launch if engine.captures_prompts else EAGER_KERNEL_SECONDS,
    )
    if row.has_word(r"pure decode|running", "concurrency_kind") and row.number("output_len") is None:
        return _single_point(row, pricer)
    result = _serve(row, pricer, limits)
    replicas = max(1, (row.count("n_gpus") or layout.gpus) // layout.gpus)
    rate = result.steady_tokens_per_second if _is_open(row) else result.tokens_per_second
    return EnginePrediction(replicas * rate, result.seconds_per_token)


def _layout(row: RlRow) -> EngineLayout:
    tensor = row.count("tp") or 1
    expert = row.count("ep") or 1
    if (row.count("pp") or 1) > 1:
        raise NotSimulatedError("engines with pipeline parallelism are not simulated")
    text = row.text("precision")
    dtype = "fp4" if row.has_word(r"gpt-oss", "model") else dtype_of(text)
    is_exempt = row.has_word(r"gpt-oss on hopper: auto", "kv_precision") and row.has_word("H[12]00", "gpu")
    is_mixed = row.has_word("gpt-oss", "model")
    cache = "fp8" if row.has_word("fp8", "kv_precision") and not (is_mixed and is_exempt) else "bf16"
    return EngineLayout(
        tensor, expert, "bf16" if dtype == "fp16" else dtype, cache, "bf16" if is_mixed else None
    )


def _utilization(row: RlRow) -> float:
    value = row.number("gpu_mem_util")
    return 0.9 if value is None else value / 100 if value > 1 else value


def _limits(row: RlRow, limits: EngineLimits) -> EngineLimits:
    blocks = row.count("kv_blocks")
    if not blocks:
        return limits
    return replace(limits, cache_blocks=blocks)


def _single_point(row: RlRow, pricer: IterationPricer) -> EnginePrediction:
    """One iteration of as many sequences as the row says, in the middle of their answers."""
    running = row.count("concurrency")
    if not running:
        raise NotSimulatedError("the number of running sequences is not published")
    context = (row.number("input_len") or 0.0) + (row.number("output_len") or 0.0) / 2 or _CONTEXT
    seconds = pricer.seconds(running, running * context)
    return EnginePrediction(running / seconds, seconds)


def _serve(row: RlRow, pricer: IterationPricer, limits: EngineLimits) -> ServingResult:
    """The row's requests, in the way in which they came."""
    prompt, response = row.number("input_len"), row.number("output_len")
    if not prompt or not response:
        raise NotSimulatedError("the lengths of requests are not published")
    rate, concurrency = row.number("request_rate_per_s"), row.count("concurrency")
    is_queued = row.has_word(r"offline|queued", "concurrency_kind")
    count = min(row.count("n_requests") or (_MAX_REQUESTS if is_queued else _REQUESTS), _MAX_REQUESTS)
    is_drawn = row.has_word(r"sharegpt|per-request|lognormal|distribut", "length_law")
    generator = np.random.default_rng(0)
    lengths = _drawn(generator, prompt, response, count) if is_drawn else None
    prompts = _SHARED_PROMPTS if row.has_word("shared-prefix", "length_law") else count
    requests = []
    for number in range(count):
        tokens = (int(prompt), int(response)) if lengths is None else lengths[number]
        requests.append(SampleRequest(number, number % prompts, max(1, tokens[0]), max(1, tokens[1])))
    arrivals = None
    if rate and _is_open(row):
        arrivals = _arrivals(generator, rate, count)
    elif row.has_word(r"poisson about", "concurrency_kind"):
        peak = row.number("concurrency_kind") or 10.0
        arrivals = _arrivals(generator, peak, count)
    elif concurrency and not row.has_word(r"offline|queued", "concurrency_kind"):
        return serve(pricer, limits, requests, concurrency=concurrency)
    return serve(pricer, limits, requests, arrivals=arrivals)


def _arrivals(generator: np.random.Generator, rate: float, count: int) -> list[float]:
    """Times of a Poisson process, stretched so that their mean rate is `rate`."""
    times = np.cumsum(generator.exponential(1.0, count))
    stretched: list[float] = (times * (count / rate / times[-1])).tolist()
    return stretched


def _is_open(row: RlRow) -> bool:
    """Whether requests arrive at a rate, whatever becomes of them."""
    return bool(row.number("request_rate_per_s")) and not row.has_word(r"offline|queued", "concurrency_kind")


def _drawn(
    generator: np.random.Generator, prompt: float, response: float, count: int
) -> list[tuple[int, int]]:
    """Lengths of conversations: a normal law of half the mean, cut at a twentieth and at three times it."""
    drawn = []
    for _ in range(count):
        pair = [
            int(np.clip(generator.normal(mean, 0.45 * mean), mean / 20, 3 * mean))
            for mean in (prompt, response)
        ]
        drawn.append((pair[0], pair[1]))
    return drawn
