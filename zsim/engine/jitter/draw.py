"""The factors of jitter on kernels, which depend on the seed and on nothing else that is simulated.

A factor is lognormal with mean 1. For an op of several launches it has the spread of their sum: with c the
op's concentration (`zsim.engine.priced_program`) and s a launch's sigma, log(1 + c (exp(s^2) - 1)) is the
variance of its logarithm (L. Fenton, 1960: a sum of lognormals is nearly lognormal, with the sum's mean and
variance).
"""

from __future__ import annotations

import numpy as np

from zsim.arrays import Floats
from zsim.engine.prepare import Seconds
from zsim.specs.experiment.jitter import JitterConfig

_RANKS, _OPS, _CROWD = 0, 1, 2  # streams of random numbers that share a seed


def rank_factors(jitter: JitterConfig, world_size: int) -> Floats:
    """Per rank, the factor on its kernels' seconds over the whole run."""
    normal = np.random.default_rng([jitter.seed, _RANKS]).standard_normal(world_size)
    return lognormal(normal, jitter.rank_sigma)


def op_seconds(
    jitter: JitterConfig, step: int, rank: int, seconds: Seconds, concentration: Floats
) -> Seconds:
    """Seconds of one rank's kernels in one drawn step. `seconds` are those without jitter from step
    to step.
    """
    normal = np.random.default_rng([jitter.seed, _OPS, step, rank]).standard_normal(len(seconds))
    factors = lognormal(normal, sigma_of_sum(jitter.kernel_sigma, concentration)).tolist()
    return [
        None if kernel_seconds is None else kernel_seconds * factor
        for kernel_seconds, factor in zip(seconds, factors, strict=True)
    ]


def class_generator(jitter: JitterConfig, step: int) -> np.random.Generator:
    """The random numbers of a step for all ranks of the classes."""
    return np.random.default_rng([jitter.seed, _CROWD, step])


def sigma_of_sum(sigma: float, concentration: Floats) -> Floats:
    """Standard deviation of the logarithm of sums of lognormals that have `sigma` each."""
    sigmas: Floats = np.sqrt(np.log1p(concentration * np.expm1(sigma * sigma)))
    return sigmas


def lognormal(normal: Floats, sigma: Floats | float) -> Floats:
    """Lognormal numbers of mean 1, from standard normal numbers."""
    factors: Floats = np.exp(sigma * normal - np.square(sigma) / 2)
    return factors
