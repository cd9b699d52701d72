"""Micro-batches of drawn documents, as the mean rank and the slowest rank compute them.

# [Note: the slowest rank of a micro-batch]
Ranks that gather parameters or reduce gradients in every micro-batch (FSDP2, FSDP1, ZeRO-3) wait for one
another there, so a step takes the sum of its micro-batches' slowest ranks. Other ranks synchronize once a
step, which takes the largest of the ranks' sums. Ranks that share experts exchange rows in every layer. Each
such group takes the sum of its own slowest ranks, and a step takes the largest of the groups' sums. All
values are means over drawn steps. The slowest rank has the most FLOPs, a for each token plus b for each pair
of a token and a token of its document. Work that is launched by document, whatever its length, is the host's:
of that the slowest rank has the most documents.

Uniform numbers are those of numpy's PCG64. Lengths are made of them by inverse distributions, and normal
numbers by Box and Muller's method (1958), so that a seed means the same lengths everywhere. Between bounds,
numbers are drawn from the part of the distribution function between them, with Wichura's inverse (1988) for
normal numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, expm1, gcd, inf, log, pi
from statistics import NormalDist

import numpy as np

from zsim.arrays import Floats
from zsim.errors import InputError
from zsim.specs.experiment.data.lengths import LengthsTable, check_lengths, histogram_of
from zsim.specs.strategy.images import SampledLengths

_NUM_STEPS = 32  # drawn
_MAX_SEQUENCES = 60_000  # sequences in all of them
_MIN_PROBABILITY = 1e-12  # of a law that must lie between its bounds


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A step's micro-batches, before the lengths of their documents are drawn."""

    ranks: int
    """Replicas of the model."""
    micro_batches: int
    """Micro-batches of a replica in a step."""
    sequences: int
    """Sequences of a micro-batch."""
    length: int
    """Largest number of tokens of a sequence."""
    sync_group_size: int
    """Replicas of a group that waits for one another in each micro-batch."""


def draw_lengths(
    table: LengthsTable, plan: BatchPlan, token_flops: float, pair_flops: float, multiple: int = 1
) -> SampledLengths:
    """The micro-batches of the mean and of the slowest rank.

    The tokens of a padded sequence are rounded up to `multiple`. Raises InputError for a table that names no
    lengths, or several.
    """
    check_lengths(table)
    steps, micro_batches = num_drawn_steps(plan)
    generator = np.random.default_rng(table.seed)
    shape = (steps, micro_batches, plan.ranks, plan.sequences)
    if table.batching == "packed":
        real_tokens, pairs, documents = _pack_micro_batches(table, generator, shape, plan.length)
        tokens = np.full(shape[:3], float(plan.sequences * plan.length))
    else:
        real_tokens, tokens, pairs = _pad_micro_batches(table, generator, shape, plan.length)
        documents = np.full(shape[:3], float(plan.sequences))
    if table.batching == "packed" and not table.attention_by_document:
        pairs = tokens * plan.length
    cost = token_flops * tokens + pair_flops * pairs
    slowest_tokens, slowest_pairs = (
        slowest_rank_mean(cost, tokens, plan),
        slowest_rank_mean(cost, pairs, plan),
    )
    longest = ceil(slowest_tokens / plan.sequences / multiple - 1e-9) * multiple
    return SampledLengths(
        length=min(longest, -(-plan.length // multiple) * multiple),
        span=slowest_pairs / slowest_tokens,
        real_tokens=float(real_tokens.mean()),
        mean_tokens=float(tokens.mean()),
        slowest_over_mean=slowest_rank_mean(cost, cost, plan) / float(cost.mean()),
        masks_by_document=table.batching == "packed" and table.attention_by_document,
        documents=slowest_rank_mean(documents, documents, plan),
    )


def num_drawn_steps(plan: BatchPlan) -> tuple[int, int]:
    """(steps, micro-batches of each) that are drawn, so that the sequences of all of them are not too
    many.
    """
    micro_batches = min(plan.micro_batches, max(1, _MAX_SEQUENCES // (plan.ranks * plan.sequences)))
    sequences_per_step = plan.ranks * micro_batches * plan.sequences
    return max(1, min(_NUM_STEPS, _MAX_SEQUENCES // sequences_per_step)), micro_batches


def slowest_rank_mean(cost: Floats, values: Floats, plan: BatchPlan) -> float:
    """Mean over steps and micro-batches of `values` of the slowest rank. See [Note: the slowest rank of a
    micro-batch].
    """
    groups = (*cost.shape[:2], -1, gcd(plan.sync_group_size, plan.ranks))
    cost, values = cost.reshape(groups), values.reshape(groups)
    slowest = cost.argmax(axis=3)[..., None]
    cost = np.take_along_axis(cost, slowest, axis=3)[..., 0].mean(axis=1)
    values = np.take_along_axis(values, slowest, axis=3)[..., 0].mean(axis=1)
    return float(np.take_along_axis(values, cost.argmax(axis=1)[:, None], axis=1).mean())


def _sample_lengths(table: LengthsTable, generator: np.random.Generator, count: int) -> Floats:
    """`count` drawn lengths, in whole tokens of at least one."""
    uniform = generator.random(count)
    if table.law == "constant":
        drawn_lengths = np.full(count, float(table.mean or 1))
    elif table.law == "uniform":
        low, high = table.low or 1, table.high or 1
        drawn_lengths = np.floor(low + uniform * (high - low + 1))
    elif table.low is not None or table.high is not None:
        drawn_lengths = _bounded_lengths(table, uniform)
    elif table.law == "exponential":
        drawn_lengths = -float(table.mean or 1) * np.log1p(-uniform)
    elif table.law == "lognormal":
        normal = np.sqrt(-2.0 * np.log1p(-uniform)) * np.cos(2.0 * pi * generator.random(count))
        drawn_lengths = np.exp(log(table.median or 1) + (table.sigma or 0.0) * normal)
    else:
        values, weights = histogram_of(table)
        edges = np.cumsum(np.array(weights)) / sum(weights)
        indices = np.minimum(np.searchsorted(edges, uniform, side="right"), len(values) - 1)
        drawn_lengths = np.array(values, dtype=np.float64)[indices]
    lengths: Floats = np.maximum(np.rint(drawn_lengths), 1.0)
    return lengths


def _bounded_lengths(table: LengthsTable, uniform: Floats) -> Floats:
    """Lengths of the exponential or the lognormal law that round to the bounds or lie between them.

    Raises InputError where the law has almost no lengths there.
    """
    ends = (table.low or 1) - 0.5, inf if table.high is None else table.high + 0.5
    normal = NormalDist()
    if table.law == "exponential":
        mean = float(table.mean or 1)
        first, last = (-expm1(-end / mean) for end in ends)
    else:
        middle, width = log(table.median or 1), max(table.sigma or 0.0, 1e-9)
        first, last = (1.0 if end == inf else normal.cdf((log(end) - middle) / width) for end in ends)
    if last - first < _MIN_PROBABILITY:
        high = "no bound" if table.high is None else f"{table.high:,}"
        raise InputError(
            f"training.lengths: law '{table.law}' has next to no lengths from {table.low or 1:,} to {high}; "
            "expected bounds around its mean or median"
        )
    probabilities = first + uniform * (last - first)
    if table.law == "exponential":
        drawn_lengths = -mean * np.log1p(-probabilities)
    else:
        drawn_lengths = np.exp(
            [
                middle + width * normal.inv_cdf(min(max(probability, _MIN_PROBABILITY), 1 - 1e-15))
                for probability in probabilities
            ]
        )
    lengths: Floats = np.clip(drawn_lengths, table.low or 1, table.high)
    return lengths


def _pad_micro_batches(
    table: LengthsTable, generator: np.random.Generator, shape: tuple[int, ...], length: int
) -> tuple[Floats, Floats, Floats]:
    """Real tokens, tokens, and pairs of tokens of each micro-batch. A sequence is one document, padded to the
    longest.
    """
    drawn_lengths = np.minimum(_sample_lengths(table, generator, int(np.prod(shape))), length).reshape(shape)
    longest = np.minimum(np.ceil(drawn_lengths.max(axis=3) / table.pad_to) * table.pad_to, length)
    tokens = longest * shape[3]
    return drawn_lengths.sum(axis=3), tokens, tokens * longest


def _pack_micro_batches(
    table: LengthsTable, generator: np.random.Generator, shape: tuple[int, ...], length: int
) -> tuple[Floats, Floats, Floats]:
    """Real tokens, pairs of tokens and documents of each micro-batch, whose documents follow one another and
    are cut at the ends of sequences.
    """
    count = int(np.prod(shape))
    total, ends, packed_tokens = count * length, [np.zeros(1)], 0.0
    while packed_tokens < total:
        chunk_ends = packed_tokens + np.cumsum(_sample_lengths(table, generator, 4 * count + 1024))
        ends.append(chunk_ends)
        packed_tokens = float(chunk_ends[-1])
    document_ends = np.concatenate(ends)
    cuts = np.union1d(document_ends[document_ends < total], np.arange(count + 1, dtype=np.float64) * length)
    pieces = np.diff(cuts)
    rows = (cuts[:-1] // length).astype(np.int64)
    pairs = np.bincount(rows, pieces * pieces, count).reshape(shape).sum(axis=3)
    documents = np.bincount(rows, minlength=count).astype(np.float64).reshape(shape).sum(axis=3)
    return np.full(shape[:3], float(shape[3] * length)), pairs, documents
