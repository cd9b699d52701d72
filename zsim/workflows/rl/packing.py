"""Samples dealt out to the trainer's replicas, and put into micro-batches.

Frameworks that pack give a micro-batch samples up to a number of tokens, each of which sees its own tokens
alone. The samples of an update are dealt out so that all replicas have about as many tokens (verl
`balance_batch`, Karmarkar and Karp), and replicas run as many micro-batches as the one with most. Others give
each a number of samples, with padding or without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapreplace
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from zsim.arrays import Ints
from zsim.errors import InputError
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.rl import RlTable
from zsim.specs.experiment.tables import Experiment
from zsim.workflows.rl.samples import Samples

if TYPE_CHECKING:
    from zsim.workflows.rl.framework import Fill, RlFramework


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The micro-batches of one update, or of one pass over a rollout."""

    micro_batches: int
    """Micro-batches of every replica."""
    tokens: float
    """Tokens of a micro-batch, in the mean."""
    total_tokens: int
    """Tokens of all replicas."""
    sample_tokens: float
    """Length of samples alike that attend to as many tokens as these do: sum of squares over sum."""


def pack(lengths: Ints, replicas: int, max_tokens: int, fill: Fill = "first-fit") -> PackedBatch:
    """Samples of `lengths` tokens on `replicas`, in micro-batches of at most `max_tokens`.

    The longest samples come first, each to the replica with the fewest tokens (Graham 1969) and there into
    the first micro-batch with room. `fill` "padded" lengthens the last sample of every micro-batch until all
    have the tokens of the fullest, as stages of a pipeline exchange tensors of one shape. "even" has as many
    micro-batches as the tokens fill and cuts the samples evenly, so that some are beyond `max_tokens`.
    """
    total, longest = int(lengths.sum()), int(lengths.max())
    squares = float((lengths.astype(np.float64) ** 2).sum())
    if fill == "even":
        tokens = [0] * replicas
        for length in np.sort(lengths)[::-1].tolist():
            heapreplace(tokens, tokens[0] + length)
        count = min(ceil(max(tokens) / max_tokens), ceil(len(lengths) / replicas))
        return PackedBatch(count, total / replicas / count, total, squares / total)
    most = (total // replicas + longest) // max_tokens  # tokens of a replica, in whole micro-batches
    loads = [(0, replica) for replica in range(replicas)]
    bins = [_MicroBatches(max_tokens, 2 * most + 2) for _ in range(replicas)]
    for length in np.sort(lengths)[::-1].tolist():
        load, replica = loads[0]
        heapreplace(loads, (load + length, replica))
        bins[replica].put(length)
    count = max(1, max(batches.count for batches in bins))
    if fill == "padded":
        fullest = max(batches.fullest for batches in bins)
        squares += sum(batches.padded_squares(fullest) for batches in bins)
        squares += (replicas * count - sum(batches.count for batches in bins)) * fullest**2
        return PackedBatch(count, fullest, total, squares / (replicas * count * fullest))
    return PackedBatch(count, total / replicas / count, total, squares / total)


def batch_by_count(lengths: Ints, replicas: int, size: int) -> PackedBatch:
    """Samples of `lengths` tokens on `replicas`, in micro-batches of `size` samples without padding.

    As replicas wait for each other in every micro-batch, the one with most tokens of those that run at once
    counts.
    """
    total = int(lengths.sum())
    slots = _slots(lengths, replicas, size)
    squares = float((lengths.astype(np.float64) ** 2).sum())
    tokens = float(slots.sum(axis=2).max(axis=0).mean())
    return PackedBatch(slots.shape[1], tokens, total, squares / total)


def batch_padded(lengths: Ints, replicas: int, size: int, longest: int | None = None) -> PackedBatch:
    """Samples of `lengths` tokens on `replicas`, in micro-batches of `size` that are padded to `longest`.

    Without it each is padded to its own longest. As replicas wait for each other in every micro-batch, the
    longest of those that run at once counts.
    """
    slots = _slots(lengths, replicas, size)
    padded = float(longest or slots.max(axis=(0, 2)).mean())
    return PackedBatch(slots.shape[1], size * padded, int(lengths.sum()), padded)


def _slots(lengths: Ints, replicas: int, size: int) -> Ints:
    """Samples by replica, micro-batch and place in it, 0 where there is none."""
    count = ceil(ceil(len(lengths) / replicas) / size)
    slots = np.zeros(replicas * count * size, dtype=lengths.dtype)
    slots[: len(lengths)] = lengths
    return slots.reshape(replicas, count, size)


class SampleBatching:
    """How samples become micro-batches of the trainer."""

    def __init__(self, table: RlTable, framework: RlFramework, job: Job, samples: Samples) -> None:
        self.kind = table.batching or framework.batching
        self.size = job.training.micro_batch_size
        self.max_tokens = table.micro_batch_tokens or job.training.micro_batch_tokens
        self._pass_size = table.logprob_micro_batch_size or self.size
        for name, size, size_key in (
            ("micro_batch_tokens", self.size, "training.micro_batch_size"),
            ("logprob_micro_batch_tokens", self._pass_size, "rl.logprob_micro_batch_size"),
        ):
            if (tokens := getattr(table, name)) and self.kind != "packed":
                raise InputError(
                    f"rl.{name}: found {tokens:,} with micro-batches of {size} samples; expected "
                    f'rl.batching = "packed", or {size_key}'
                )
        if table.logprob_micro_batch_tokens and table.logprob_micro_batch_size:
            raise InputError(
                f"rl.logprob_micro_batch_tokens: found {table.logprob_micro_batch_tokens:,} beside "
                f"rl.logprob_micro_batch_size {table.logprob_micro_batch_size:,}; expected one of them"
            )
        self._pass_tokens = table.logprob_micro_batch_tokens or (
            self._pass_size * job.training.sequence_length
            if table.logprob_micro_batch_size
            else self.max_tokens
        )
        self._replicas = job.data_parallel_size
        self.fill: Fill = framework.fill
        if framework.pads_for_stages and job.parallelism.pipeline > 1:
            self.fill = "padded"
        observed = (table.environment.turns - 1) * table.environment.observation_tokens
        cap = job.training.sequence_length
        longest = {
            "micro-batch": None,
            "rollout": int(samples.totals.max()) + observed,
            "sides": min(cap, int(samples.prompts.max() + samples.responses.max()) + observed),
            "cap": cap,
        }
        self._longest = longest[framework.padding]

    def batch(self, lengths: Ints, *, is_pass: bool = False) -> PackedBatch:
        """The micro-batches of samples of `lengths` tokens, in an update or a pass without backward.

        Those of a prompt are apart: they are shuffled (TRL f2cd5771 `shuffle_sequence_dict`, OpenRLHF
        3c3be623 trainer/ray/ppo_actor.py) or dealt out by their length (verl `balance_batch`).
        """
        if self.kind == "packed":
            tokens = self._pass_tokens if is_pass else self.max_tokens
            return pack(lengths, self._replicas, tokens, self.fill)
        size = self._pass_size if is_pass else self.size
        lengths = np.random.default_rng(0).permutation(lengths)
        if self.kind == "unpadded":
            return batch_by_count(lengths, self._replicas, size)
        return batch_padded(lengths, self._replicas, size, self._longest)


def batch_notes(experiment: Experiment, update: PackedBatch, dealt: SampleBatching) -> Iterator[str]:
    """Notes on the micro-batches of an update, and on the keys of the trainer that do not count for them."""
    plural = "" if update.micro_batches == 1 else "es"
    count = f"an update is {update.micro_batches:,} micro-batch{plural} a replica of"
    said = experiment.rl is not None and experiment.rl.micro_batch_tokens is not None
    if dealt.kind == "packed":
        mean = "as the stages pad them" if dealt.fill == "padded" else "on average"
        key = "rl.micro_batch_tokens" if said else "training.sequence_length x training.micro_batch_size"
        tokens = f"{update.tokens:,.0f} tokens {mean}"
        yield f"samples are packed: {count} {tokens}, at most {dealt.max_tokens:,} ({key})"
    elif dealt.kind == "unpadded":
        yield f"{count} {dealt.size:,} samples without padding, {update.tokens:,.0f} tokens on average"
    else:
        yield f"{count} {dealt.size:,} samples, padded to {update.sample_tokens:,.0f} tokens"
    for key in ("gradient_accumulation_steps", "global_batch_size"):
        value = getattr(experiment.training, key)
        is_same = key == "gradient_accumulation_steps" and value == update.micro_batches
        if key in experiment.training.model_fields_set and value is not None and not is_same:
            yield (
                f"training.{key} = {value:,} does not count: the samples of an "
                "update are rl.mini_batch_samples"
            )
    if "lengths" in experiment.training.model_fields_set and experiment.training.lengths is not None:
        yield "training.lengths do not count: samples are those of rl.lengths"


class _MicroBatches:
    """The micro-batches of a replica, of which the first with room is found by a tree of the largest rooms.

    Of first-fit's, all but one are more than half full, so that there are at most twice as many as the tokens
    would fill.
    """

    def __init__(self, max_tokens: int, most: int) -> None:
        self._leaves = 1 << (most - 1).bit_length()
        self._max_tokens = max_tokens
        self._rooms = [max_tokens] * (2 * self._leaves)
        self._last = [0] * self._leaves  # tokens of the sample that was put in last
        self._longer: list[int] = []
        self._used = 0

    @property
    def count(self) -> int:
        return self._used + len(self._longer)

    @property
    def fullest(self) -> int:
        """Tokens of the fullest."""
        rooms = self._rooms[self._leaves : self._leaves + self._used]
        return max(*self._longer, self._max_tokens - min(rooms, default=self._max_tokens), 0)

    def padded_squares(self, tokens: int) -> int:
        """The growth of the sum of squares of samples, if each micro-batch is padded to `tokens`."""
        rooms = self._rooms[self._leaves : self._leaves + self._used]
        spare = [tokens - self._max_tokens + room for room in rooms]
        grown = sum((2 * last + pad) * pad for last, pad in zip(self._last, spare, strict=False))
        return grown + sum(tokens**2 - length**2 for length in self._longer)

    def put(self, length: int) -> None:
        """Add a sample to the first micro-batch with room, or alone to one if it is longer than any."""
        rooms, node = self._rooms, 1
        if length > rooms[1]:
            self._longer.append(length)
            return
        while node < self._leaves:
            node *= 2
            node += rooms[node] < length
        self._used = max(self._used, node - self._leaves + 1)
        self._last[node - self._leaves] = length
        rooms[node] -= length
        while node := node // 2:
            rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
