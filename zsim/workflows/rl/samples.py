"""The samples of a rollout: how long their prompts and responses are.

[Note: hard questions] The lengths of responses to one prompt go together. Normal numbers of a group share a
part of variance `correlation`, and are made lengths by the law's inverse distribution (a Gaussian copula), so
that each response alone follows the law whatever the correlation.

[Note: means of cut lengths] Logs print the mean of lengths that generation has cut at the cap c. For the
lognormal law with parameters m and s that mean is

    exp(m + s^2 / 2) Phi((ln c - m - s^2) / s) + c (1 - Phi((ln c - m) / s)),

which grows with m, so that m follows from a mean by bisection.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, exp, log, sqrt
from statistics import NormalDist

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.errors import InputError
from zsim.specs.experiment.rl import DEFAULT_SIGMA, LengthLaw, RlLengthsTable, RlTable

_NORMAL = NormalDist()
_BISECTIONS = 60
MAX_SAMPLES = 2**18
"""Samples of a step, those of dropped prompts included: 32 times those of the largest published steps (DAPO's
8,192). Drawing and packing more takes longer than anybody waits."""
MAX_SIMULATED_SAMPLES = 4096  # with more, a part of the replicas is simulated
_MAX_TURNS = 2**19  # of all simulated samples


@dataclass(frozen=True, eq=False)
class Samples:
    """Tokens of prompts and responses. Rows are prompts, columns the samples of each."""

    prompts: Ints
    """Per prompt."""
    responses: Ints
    """Per prompt and sample."""

    @property
    def totals(self) -> Ints:
        """Tokens of prompt and response, of every sample."""
        totals: Ints = (self.responses + self.prompts[:, None]).ravel()
        return totals

    def shortest(self, count: int) -> Samples:
        """The `count` prompts whose responses end first where all start together."""
        order = np.argsort(self.responses.max(axis=1), kind="stable")[:count]
        first = np.sort(order)
        return Samples(self.prompts[first], self.responses[first])


def draw_samples(
    table: RlLengthsTable, prompts: int, samples: int, sequence_length: int, seed: int = 0
) -> Samples:
    """`prompts` prompts with `samples` responses each, of the laws of `[rl.lengths]`.

    `seed` is added to that of the table. Raises InputError if the longest sample is longer than a sequence.
    """
    generator = np.random.default_rng([table.seed, seed])
    prompt_cap = table.prompt.high or sequence_length
    drawn_prompts = _lengths(table.prompt, _normals(generator, prompts, 1, 0.0), prompt_cap, "prompt")[:, 0]
    cap = response_cap(table, int(drawn_prompts.max()), sequence_length)
    normals = _normals(generator, prompts, samples, table.correlation)
    responses = _lengths(table.response, normals, cap, "response")
    longest = int((responses.max(axis=1) + drawn_prompts).max())
    if longest > sequence_length:
        raise InputError(
            f"training.sequence_length: found {sequence_length:,}, but prompts and responses of "
            f"`[rl.lengths]` are up to {longest:,} tokens; expected at least that"
        )
    return Samples(drawn_prompts, responses)


def response_cap(table: RlLengthsTable, longest_prompt: int, sequence_length: int) -> int:
    """Tokens at which a response ends at the latest."""
    cap = table.max_response or table.response.high or sequence_length - longest_prompt
    if cap < 1:
        raise InputError(
            f"training.sequence_length: found {sequence_length:,}, which a prompt of {longest_prompt:,} "
            "tokens fills; expected room for a response"
        )
    return cap


def _normals(generator: np.random.Generator, groups: int, size: int, correlation: float) -> Floats:
    """Standard normal numbers, correlated within a group. Each part is one number from every slice of equal
    probability, in random order, so that a single draw has nearly the law's own mean.
    """
    shared = generator.permutation(_midpoints(groups))[:, None]
    single = generator.permutation(_midpoints(groups * size)).reshape(groups, size)
    numbers: Floats = sqrt(correlation) * shared + sqrt(1.0 - correlation) * single
    return numbers


@cache
def _midpoints(count: int) -> Floats:
    """Normal numbers in the middle of `count` slices of equal probability."""
    return np.array([_NORMAL.inv_cdf((index + 0.5) / count) for index in range(count)])


def _lengths(law: LengthLaw, normals: Floats, cap: int, name: str) -> Ints:
    """Lengths of the law, one for each normal number."""
    low = law.low or 1
    if law.values is not None:
        values = np.sort(np.array(law.values))
        indices = np.minimum((_cdf(normals) * len(values)).astype(np.int64), len(values) - 1)
        drawn: Floats = values[indices].astype(np.float64)
    elif _law_of(law, name) == "constant":
        drawn = np.full(normals.shape, law.mean or law.median or 1.0)
    elif _law_of(law, name) == "uniform":
        drawn = low + _cdf(normals) * ((law.high or cap) - low)
    elif _law_of(law, name) == "exponential":
        drawn = -(law.mean or 1.0) * np.log1p(-_cdf(normals))
    else:
        sigma = sigma_of(law)
        drawn = np.exp(_log_median(law, sigma, cap) + sigma * normals)
    lengths: Ints = np.clip(np.rint(drawn), low, min(cap, law.high or cap)).astype(np.int64)
    return lengths


def sigma_of(law: LengthLaw) -> float:
    """Standard deviation of the logarithm of a lognormal law's lengths."""
    return DEFAULT_SIGMA if law.sigma is None else law.sigma


def _law_of(law: LengthLaw, name: str) -> str:
    if law.law is not None:
        return law.law
    if law.sigma is not None or law.median is not None:
        return "lognormal"
    if law.mean is None:
        return "uniform"
    return "lognormal" if name == "response" else "constant"


def _log_median(law: LengthLaw, sigma: float, cap: int) -> float:
    """The parameter m of the lognormal law, see [Note: means of cut lengths]."""
    if law.median is not None:
        return log(law.median)
    assert law.mean is not None
    if law.mean >= cap:
        raise InputError(
            f"rl.lengths.response.mean: found {law.mean:,.6g} with a cap of {cap:,} tokens, at which "
            "responses end; expected a smaller mean"
        )
    low, high = log(law.mean) - sigma**2 - 1.0, log(cap) + 8.0 * sigma + 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _cut_mean(middle, sigma, cap) < law.mean else (low, middle)
    return low


def _cut_mean(m: float, sigma: float, cap: float) -> float:
    if sigma == 0.0:
        return min(exp(m), cap)
    z = (log(cap) - m) / sigma
    return exp(m + sigma**2 / 2) * _NORMAL.cdf(z - sigma) + cap * (1.0 - _NORMAL.cdf(z))


def _cdf(normals: Floats) -> Floats:
    probabilities: Floats = np.vectorize(_NORMAL.cdf)(normals)
    return np.minimum(probabilities, 1.0 - 1e-12)


def check_size(table: RlTable) -> None:
    """Raises InputError for more samples, or more turns, than are simulated."""
    drawn = table.prompts_per_step * table.samples_per_prompt
    started = drawn * table.over_sampling * table.sampling_rounds
    if started > MAX_SAMPLES:
        factors = "" if started == drawn else " x over_sampling x sampling_rounds"
        raise InputError(
            f"rl.prompts_per_step: found {table.prompts_per_step:,} x samples_per_prompt "
            f"{table.samples_per_prompt:,}{factors} = {started:,.0f} samples of a step, expected at most "
            f"{MAX_SAMPLES:,}; simulate a part of the prompts on the same part of the GPUs"
        )
    simulated, turns = ceil(min(started, MAX_SIMULATED_SAMPLES)), table.environment.turns
    if simulated * turns > _MAX_TURNS:
        raise InputError(
            f"rl.environment.turns: found {turns:,} with {simulated:,} samples, {simulated * turns:,} "
            f"turns in a step; expected at most {_MAX_TURNS // simulated:,}"
        )
