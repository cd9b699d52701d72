"""`[training.images]` and `[training.audio]`: how many images and sounds a sample has, of which sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import floor, sqrt
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from zsim.arrays import Floats
from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.specs.experiment.data.draw import BatchPlan, num_drawn_steps, slowest_rank_mean
from zsim.specs.lazy_model import StrictTable
from zsim.specs.model.image_rules import SoundRule
from zsim.specs.model.spec import ModelSpec, Tower
from zsim.specs.strategy.images import ImageSize, SampledImages, average_size
from zsim.specs.strategy.training import Checkpointing, TrainingConfig

Side = Annotated[int, Field(ge=1, le=2**20, strict=True)]
Pixels = Annotated[int, Field(ge=1, le=2**40, strict=True)]
_MAX_COUNT = 100_000


class _SamplesTable(StrictTable):
    """How many images or sounds a sample has, a sample being a sequence of `sequence_length` tokens, theirs
    included.
    """

    per_sample: float | None = Field(
        default=None,
        ge=0,
        le=_MAX_COUNT,
        allow_inf_nan=False,
        description="mean number in a sample; left out: see `counts`",
    )
    law: Literal["constant", "poisson"] = Field(
        default="constant", description="law that a sample's number is drawn from"
    )
    counts: tuple[Annotated[int, Field(ge=0, le=_MAX_COUNT, strict=True)], ...] | None = Field(
        default=None,
        min_length=1,
        max_length=_MAX_COUNT,
        description="numbers that a sample's is drawn from, 0 for text alone; left out: see `per_sample`",
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, strict=True, description="seed of the draws")

    @property
    def num_sizes(self) -> int:
        """Different sizes of images or sounds."""
        return 1

    @property
    def is_drawn(self) -> bool:
        """Whether samples differ in their images or sounds."""
        if self.num_sizes > 1:
            return True
        if self.counts is not None:
            return len(set(self.counts)) > 1
        return self.law != "constant" or self.per_sample != floor(self.per_sample or 0.0)


class AudioTable(_SamplesTable):
    """The sounds of samples."""

    seconds: tuple[Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)], ...] = Field(
        min_length=1, max_length=100, description="lengths of sounds, from which each sound's is drawn"
    )

    @property
    def num_sizes(self) -> int:
        return len(set(self.seconds))


class ImagesTable(_SamplesTable):
    """The images of samples."""

    width: Side | None = Field(default=None, description="pixels; left out: for `pixels`")
    height: Side | None = Field(default=None, description="pixels; left out: for `pixels`")
    pixels: Pixels | None = Field(
        default=None, description="area of a square image; left out: for `width` and `height`"
    )
    sizes: tuple[tuple[Side, Side], ...] | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        description="widths and heights in pixels that an image's are drawn from; left out: one size",
    )
    min_pixels: Pixels | None = Field(
        default=None, description="smallest area that images are scaled to; left out: the model's"
    )
    max_pixels: Pixels | None = Field(
        default=None, description="largest area that images are scaled to; left out: the model's"
    )
    max_tiles: Annotated[int, Field(ge=1, le=1024, strict=True)] | None = Field(
        default=None,
        description="tiles of an image at most, where the model has tiles; left out: the model's",
    )
    activation_checkpointing: Checkpointing | None = Field(
        default=None,
        description="what backward computes again in the tower; left out: as in the language model",
    )

    @property
    def num_sizes(self) -> int:
        return len(set(self.sizes or ((0, 0),)))


class _Kind(NamedTuple):
    """The words of messages for images or for sounds."""

    key: str
    """The key of its table below `training`."""
    plural: str
    """Also the field of the training."""
    tower: str
    rows: str
    """The name of what its tower counts."""


_IMAGES = _Kind("images", "images", "vision", "patches")
_SOUNDS = _Kind("audio", "sounds", "audio", "rows")


def _check_number(table: _SamplesTable, kind: _Kind) -> None:
    """Raises InputError unless the table says one number of a sample's images or sounds."""
    if (table.per_sample is None) == (table.counts is None):
        count = "both" if table.counts is not None else "neither"
        raise InputError(
            f"training.{kind.key}: found {count} of `per_sample` and `counts`; expected one of them: how "
            f"many {kind.plural} a sample has"
        )
    if table.counts is not None and table.law != "constant":
        raise InputError(f"training.{kind.key}.law: found with `counts`, which are drawn as they are")


def check_images(table: ImagesTable) -> None:
    """Raises InputError unless the table says how many images there are, and how large."""
    _check_number(table, _IMAGES)
    sides = (table.width is None) + (table.height is None)
    stated = (sides == 0) + (table.pixels is not None) + (table.sizes is not None)
    if sides == 1 or stated != 1:
        raise InputError(
            "training.images: expected the size of an image, as `width` and `height` or as `pixels`, or of "
            "images as `sizes`"
        )
    if table.min_pixels is not None and table.max_pixels is not None and table.min_pixels > table.max_pixels:
        raise InputError(
            f"training.images.max_pixels: found {table.max_pixels:,}, expected at least min_pixels, "
            f"{table.min_pixels:,}"
        )


def image_sizes(table: ImagesTable, model: ModelSpec) -> list[ImageSize]:
    """The images as the model's tower sees them, by the model's own rule.

    Raises InputError for bounds that the model's rule has not.
    """
    assert model.vision_tower is not None
    rule = model.vision_tower.image_rule
    bounds = {
        name: getattr(table, name)
        for name in ("min_pixels", "max_pixels", "max_tiles")
        if getattr(table, name) is not None
    }
    bound_names = rule.bounds
    for name in bounds:
        if name not in bound_names:
            expected = (
                f"; expected {' and '.join(bound_names)}"
                if bound_names
                else ", whose images all have one size"
            )
            hint = did_you_mean(name, bound_names)
            raise InputError(f"training.images.{name}: '{model.name}' has no such bound{hint}{expected}")
    side = max(1, round(sqrt(table.pixels))) if table.pixels else 0
    pixels = table.sizes or ((table.width or side, table.height or side),)
    return [rule.set_bounds(**bounds).size_of(*sides) for sides in pixels]


def apply_images(
    training: TrainingConfig,
    images: ImagesTable | None,
    audio: AudioTable | None,
    model: ModelSpec,
    plan: BatchPlan,
) -> tuple[TrainingConfig, Sequence[str]]:
    """The training with the images and sounds of a model that has towers and how their blocks are recomputed,
    and notes on them. Without a table of its own a tower gets one smallest image or sound in a micro-batch.

    Raises InputError for images or sounds of a model without their tower, and for more tokens of them than a
    sequence has.
    """
    policy = None if images is None else images.activation_checkpointing
    notes, shares, tokens = list[str](), dict[str, str](), 0.0
    if model.towers:
        training = replace(training, tower_checkpointing=policy or training.activation_checkpointing)
    tables: tuple[tuple[_Kind, _SamplesTable | None, Tower | None], ...] = (
        (_SOUNDS, audio, model.audio_tower), (_IMAGES, images, model.vision_tower),
    )  # fmt: skip
    for kind, table, tower in tables:
        if tower is None and table is not None:
            raise InputError(
                f"training.{kind.key}: '{model.name}' has no {kind.tower} tower; expected a multimodal "
                f"config.json, or no {kind.plural}"
            )
        if tower is None:
            continue
        samples = None if table is None else _sample(training, table, kind, model, tower, plan)
        if samples is None:
            samples, note = _use_dummies(training, model, tower, kind)
        elif tower.is_attended and samples.mean_per_sequence != 1:
            raise NotSimulatedError(
                f"training.{kind.key}: found {samples.mean_per_sequence:,.3g} {kind.plural} a sample, but "
                f"'{model.name}' has one; expected per_sample = 1"
            )
        else:
            of_samples = samples.mean_per_sequence * samples.size.tokens
            note = (
                f"{kind.plural}: {samples.mean_per_sequence:,.3g} a sample, "
                f"{samples.size.tokens:,.0f} tokens each ({of_samples:,.0f} of the "
                f"{training.sequence_length:,} tokens of a sequence), "
                f"{samples.size.rows:,.0f} {kind.rows} each in the tower" + _imbalance(samples)
            )
            tokens += 0 if tower.is_attended else of_samples
            shares[f"training.{kind.key}"] = (
                f"{samples.mean_per_sequence:,.3g} {kind.plural} of {samples.size.tokens:,.0f} tokens each"
            )
        notes.append(note)
        training = replace(training, **{kind.plural: samples})  # type: ignore[arg-type]
    if tokens > training.sequence_length:
        raise InputError(
            f"{' and '.join(shares)}: {' and '.join(shares.values())} are more than the "
            f"{training.sequence_length:,} tokens of a sequence; expected fewer or smaller ones, or a longer "
            "sequence_length"
        )
    return training, notes


def _sample(
    training: TrainingConfig,
    table: _SamplesTable,
    kind: _Kind,
    model: ModelSpec,
    tower: Tower,
    plan: BatchPlan,
) -> SampledImages | None:
    """The images or sounds of a table. None where no sample has one. One table alone may differ by rank, as
    the slowest rank of two is not the same.
    """
    by_rank = {"lengths": training.lengths, "audio": training.sounds}
    for name, drawn in by_rank.items():
        if drawn is not None and drawn.slowest_over_mean > 1 and table.is_drawn:
            raise NotSimulatedError(
                f"training.{kind.key}: {kind.plural} whose number or sizes are drawn, with training.{name} "
                "that differ by rank, are not simulated; expected as many of one size in each sample"
            )
    if isinstance(table, ImagesTable):
        check_images(table)
        sizes = image_sizes(table, model)
    else:
        assert isinstance(table, AudioTable)
        assert isinstance(tower.rule, SoundRule)
        _check_number(table, kind)
        sizes = [tower.rule.size_of(seconds) for seconds in table.seconds]
        if not all(size.tokens for size in sizes):
            raise InputError(
                f"training.audio.seconds: found {min(table.seconds)}, of which '{model.name}' makes no "
                f"token; expected at least {tower.rule.shortest}"
            )
    samples = draw_images(table, sizes, plan)
    return samples if samples.mean_per_sequence else None


def _use_dummies(
    training: TrainingConfig, model: ModelSpec, tower: Tower, kind: _Kind
) -> tuple[SampledImages, str]:
    if tower.is_attended:
        size = tower.rule.smallest
        note = f"{kind.plural}: 1 a sample, {size.rows:,.0f} {kind.rows} each, which tokens attend to"
        return SampledImages(size, 1, 1), note
    per_sequence = 1 / training.micro_batch_size
    note = (
        f"the {kind.tower} tower of '{model.name}' ({tower.numel / 1e6:,.0f} M parameters) is simulated "
        f"without {kind.plural}: it runs on one smallest {kind.plural[:-1]} in each micro-batch, as trainers "
        f"do for samples of text; [training.{kind.key}] says what samples have, and --set "
        "model.text_only=true leaves the tower out"
    )
    return SampledImages(tower.rule.smallest, per_sequence, per_sequence, are_dummies=True), note


def _imbalance(images: SampledImages) -> str:
    ratio = images.slowest_over_mean
    return f"; the slowest rank has {ratio:.2f} times the mean rank's" if ratio > 1.005 else ""


def draw_images(table: _SamplesTable, sizes: Sequence[ImageSize], plan: BatchPlan) -> SampledImages:
    """The images of the mean and of the slowest rank's micro-batches, which has the most patches. See [Note:
    the slowest rank of a micro-batch]. Where a micro-batch has none, the tower gets a smallest one, which
    counts as none. Of images of several sizes, those of the slowest rank have its mean size, and the mean
    rank has as many of that size as have its patches.
    """
    mean = table.per_sample if table.counts is None else float(np.mean(table.counts))
    assert mean is not None
    if not table.is_drawn or not mean:
        return SampledImages(sizes[0], mean, mean)
    steps, micro_batches = num_drawn_steps(plan)
    generator = np.random.default_rng(table.seed)
    images = _draw(table, generator, (steps, micro_batches, plan.ranks, plan.sequences)).sum(axis=3)
    numbers: Floats = images[..., None]
    if len(sizes) > 1:
        equal = np.full(len(sizes), 1 / len(sizes))
        numbers = generator.multinomial(images.astype(np.int64), equal).astype(np.float64)
    rows = np.array([size.rows for size in sizes])
    cost: Floats = numbers @ rows
    slowest = [slowest_rank_mean(cost, numbers[..., index], plan) for index in range(len(sizes))]
    per_sequence = sum(slowest) / plan.sequences
    patches = float(np.dot(rows, slowest))
    return SampledImages(
        average_size(sizes, slowest), per_sequence, per_sequence * float(cost.mean()) / patches
    )


def _draw(table: _SamplesTable, generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Numbers of images of samples. A constant law whose mean is no whole number draws one beside it."""
    if table.counts is not None:
        values: Floats = np.array(table.counts, dtype=np.float64)
        drawn: Floats = values[
            np.minimum((generator.random(shape) * len(values)).astype(np.int64), len(values) - 1)
        ]
        return drawn
    mean = table.per_sample or 0.0
    if table.law == "poisson":
        return generator.poisson(mean, shape).astype(np.float64)
    numbers: Floats = np.floor(mean) + (generator.random(shape) < mean - floor(mean))
    return numbers
