"""`[training.images]`: images of samples, and the rows of a tower."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from tests.specs.test_towers import QWEN3_VL
from zsim.cost.kernels.shapes import BatchShape
from zsim.errors import InputError, NotSimulatedError
from zsim.operations.operation import Module
from zsim.operations.residual import Residual
from zsim.specs.experiment.data.draw import BatchPlan
from zsim.specs.experiment.data.images import ImagesTable, draw_images
from zsim.specs.experiment.resolve import resolve
from zsim.specs.model.image_rules import SoundRule
from zsim.specs.strategy.images import ImageSize, SampledImages, average_size

SIZE = ImageSize(1, 784, 196, 64)


def job(images: dict[str, Any] | None, **training: Any) -> Any:
    table = {"sequence_length": 512, **training, **({"images": images} if images is not None else {})}
    return resolve(
        zsim.Experiment(
            model=QWEN3_VL, cluster="dgx-h100", nodes=1, training=table, strategy={"kind": "fsdp2"}
        )
    )


def test_a_tower_sees_images_as_sequences_and_merged_rows_as_tokens() -> None:
    """Two sequences with three images each of 784 patches: 6 x 784 rows, 6 x 196 tokens. With half an image a
    sequence and one sequence there are 392 rows, whose span is no longer than they are.
    """
    shape = BatchShape(2, 4096, images=SampledImages(SIZE, 3.0, 3.0))
    patches = shape.seen_by(Module("x", Residual(1), sample_rows="patches"))
    assert (patches.sequences, patches.sequence_length, patches.span) == (6, 784, None)
    windows = shape.seen_by(Module("x", Residual(1), sample_rows="windows"))
    assert (windows.tokens, windows.span) == (6 * 784, 64)
    assert shape.seen_by(Module("x", Residual(1), sample_rows="merged")).tokens == 6 * 196
    assert shape.seen_by(Module("x", Residual(1))).tokens == 2 * 4096
    half = BatchShape(1, 4096, images=SampledImages(SIZE, 0.5, 0.5))
    assert half.seen_by(Module("x", Residual(1), sample_rows="patches")).tokens == 392


def test_the_slowest_rank_of_a_micro_batch_has_the_most_images() -> None:
    """With counts 0 and 2 of equal chance the mean is 1. Of 64 ranks that wait for one another one nearly
    always has 2, and of one rank the slowest is the mean.
    """
    table = ImagesTable(counts=(0, 2), pixels=10_000)
    waiting = draw_images(table, [SIZE], BatchPlan(64, 4, 1, 4096, sync_group_size=64))
    assert waiting.per_sequence == pytest.approx(2.0)
    assert waiting.mean_per_sequence == pytest.approx(1.0, abs=0.1)
    alone = draw_images(table, [SIZE], BatchPlan(1, 4, 1, 4096, sync_group_size=1))
    assert alone.slowest_over_mean == pytest.approx(1.0)


def test_a_constant_number_of_images_is_the_same_on_all_ranks() -> None:
    images = draw_images(
        ImagesTable(per_sample=3, pixels=10_000), [SIZE], BatchPlan(64, 4, 2, 4096, sync_group_size=64)
    )
    assert (images.per_sequence, images.mean_per_sequence) == (3, 3)


def test_images_of_several_sizes_have_all_their_rows_and_pairs_of_rows() -> None:
    """Three images of 100 patches and one of 900, in two tiles of 450: 1,200 rows, whose mean one sees (300 x
    100 + 900 x 450) / 1,200 = 362.5.
    """
    small, large = ImageSize(1, 100, 25), ImageSize(2, 450, 225)
    mean = average_size([small, large], [3, 1])
    assert mean == ImageSize(300 / 362.5, 362.5, 300 / 4, 0)
    images = SampledImages(mean, 4.0, 4.0)
    assert images.rows("patches", 1) == pytest.approx((1200, 362.5))
    assert images.rows("merged", 2)[0] == pytest.approx(600)


def test_ranks_wait_for_the_one_with_the_largest_images() -> None:
    """One image a sample, of 100 or 900 patches. Of 64 ranks that wait for one another one nearly always has
    the larger, 900 over a mean of 500; a rank by itself has the mean.
    """
    sizes = [ImageSize(1, 100, 25), ImageSize(1, 900, 225)]
    table = ImagesTable(per_sample=1, sizes=((160, 160), (480, 480)))
    waiting = draw_images(table, sizes, BatchPlan(64, 4, 1, 4096, sync_group_size=64))
    assert waiting.size.rows == pytest.approx(900)
    assert waiting.slowest_over_mean == pytest.approx(900 / 500, rel=0.05)
    alone = draw_images(table, sizes, BatchPlan(1, 1, 8, 4096, sync_group_size=1))
    assert alone.slowest_over_mean == pytest.approx(1.0)


def test_sizes_of_images_are_cut_by_the_models_rule() -> None:
    """448 x 448 pixels are 196 tokens, 224 x 224 by the model's smallest area 64."""
    images = job({"per_sample": 1, "sizes": [[448, 448], [224, 224]]}, micro_batch_size=4).training.images
    assert 64 < images.size.tokens < 196
    with pytest.raises(InputError, match="as `pixels`, or of images as `sizes`"):
        job({"per_sample": 1, "sizes": [[448, 448]], "pixels": 1000})


def test_without_images_the_tower_runs_on_a_smallest_one_and_the_report_says_so() -> None:
    resolved = job(None, micro_batch_size=2)
    assert resolved.training.images.are_dummies
    assert resolved.training.images.rows("merged", 2)[0] == 1
    (note,) = [note for note in resolved.notes if "vision tower" in note]
    assert "[training.images]" in note
    assert "--set model.text_only=true" in note


def test_tokens_of_images_count_in_the_sequence() -> None:
    """448 x 448 pixels are 196 tokens: three images do not fit into 512."""
    assert job({"per_sample": 2, "width": 448, "height": 448}).training.images.mean_per_sequence == 2
    with pytest.raises(InputError, match="3 images of 196 tokens each are more than the 512 tokens"):
        job({"per_sample": 3, "width": 448, "height": 448})


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ({"per_sample": 1}, "the size of an image"),
        ({"per_sample": 1, "width": 448}, "the size of an image"),
        ({"pixels": 1000}, "found neither of `per_sample` and `counts`"),
        ({"per_sample": 1, "counts": [1], "pixels": 1000}, "found both"),
        ({"per_sample": 1, "pixels": 1000, "max_tiles": 4}, "max_tiles: 'model' has no such bound"),
        ({"per_sample": 1, "width": 9000, "height": 10}, "200 times as long as wide"),
    ],
)
def test_what_does_not_fit_is_said(images: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(images)


def test_images_of_a_model_without_a_tower_are_an_error() -> None:
    experiment = zsim.Experiment(
        model="qwen3-8b",
        cluster="dgx-h100",
        nodes=1,
        training={"images": {"per_sample": 1, "pixels": 1000}},
        strategy={"kind": "fsdp2"},
    )
    with pytest.raises(InputError, match="'qwen3-8b' has no vision tower"):
        resolve(experiment)


QWEN2_AUDIO = SoundRule(3000, padded=True, max_pieces=1)
VOXTRAL = SoundRule(3000, merge=4, padded=True, counts_padding=True)
QWEN2_5_OMNI = SoundRule(200, window=100)
QWEN3_OMNI = SoundRule(100, merge=1, halvings=3, window=104)
GEMMA4_UNIFIED = SoundRule(3000, merge=1, halvings=2, max_pieces=1)


@pytest.mark.parametrize(
    ("rule", "seconds", "tiles", "patches", "tokens", "window"),
    [
        (QWEN2_AUDIO, 10, 1, 1500, 250, 0),  # 1,000 frames, 500 rows by twos, the tower's padded to 30 s
        (QWEN2_AUDIO, 45, 1, 1500, 750, 0),  # cut to 30 s
        (VOXTRAL, 45, 2, 1500, 750, 0),  # two pieces of 375 tokens
        (QWEN2_5_OMNI, 10, 1, 500, 250, 100),
        (QWEN2_5_OMNI, 0.61, 1, 31, 15, 31),  # 61 frames: 31 rows
        (QWEN3_OMNI, 10, 1, 130, 130, 104),  # 13 rows a second
        (QWEN3_OMNI, 2.5, 1, 33, 33, 33),  # 26 and those of 50 frames, 25, 13, 7
        (GEMMA4_UNIFIED, 0.61, 1, 16, 16, 0),  # 9,760 samples by 640
        (GEMMA4_UNIFIED, 45, 1, 750, 750, 0),  # cut to 30 s
    ],
)
def test_sounds_are_cut_by_the_models_rule(
    rule: SoundRule, seconds: float, tiles: int, patches: int, tokens: int, window: int
) -> None:
    """Frames are of 10 ms. As `_get_feat_extract_output_lengths` of each model's class in transformers."""
    assert rule.size_of(seconds) == ImageSize(tiles, patches, tokens, window)


def test_sounds_and_images_of_a_sample_share_its_tokens() -> None:
    """Of 512 tokens an image of 448 x 448 pixels has 256 and 10 seconds of sound 250; two sounds are too
    much. Without a table the tower of sounds gets 1.28 seconds, 128 frames: 64 rows, 32 tokens.
    """
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    model = {
        "model_type": "qwen2_5_omni_thinker",
        "text_config": {**QWEN3_VL["text_config"], "model_type": "qwen2_5_omni_text"},
        "vision_config": vision,
        "audio_config": {
            "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
            "output_dim": 64,
        },
    }  # fmt: skip

    def omni(**tables: Any) -> Any:
        training = {"sequence_length": 512, **tables}
        return resolve(
            zsim.Experiment(
                model=model, cluster="dgx-h100", nodes=1, training=training, strategy={"kind": "fsdp2"}
            )
        )

    images = {"per_sample": 1, "width": 448, "height": 448}
    both = omni(images=images, audio={"per_sample": 1, "seconds": [10]}).training
    assert (both.images.size.tokens, both.sounds.size.tokens) == (256, 250)
    with pytest.raises(InputError, match=r"audio and training.images: 2 sounds of 250 tokens each and 1 ima"):
        omni(images=images, audio={"per_sample": 2, "seconds": [10]})
    with pytest.raises(
        InputError, match=r"seconds: found 0.01, of which .* no token; expected at least 0.03"
    ):
        omni(audio={"per_sample": 1, "seconds": [10, 0.01]})
    drawn = {"per_sample": 0.5}
    with pytest.raises(NotSimulatedError, match=r"images: .* drawn, with training.audio that differ by rank"):
        omni(images=images | drawn, audio={"seconds": [1], **drawn})
    assert omni(images=images, audio={"seconds": [1], **drawn}).training.sounds.slowest_over_mean > 1
    with pytest.raises(InputError, match=r"^training.audio: 3 sounds of 250 tokens each are"):
        omni(images={**images, "per_sample": 0}, audio={"per_sample": 3, "seconds": [10]})
    (note,) = [note for note in omni(audio={"per_sample": 1, "seconds": [10]}).notes if "sounds: 1" in note]
    assert "500 rows each in the tower" in note
    alone = omni(images=images)
    assert (alone.training.sounds.size.rows, alone.training.sounds.size.tokens) == (64, 32)
    assert any("audio tower" in note and "[training.audio]" in note for note in alone.notes)
    with pytest.raises(InputError, match=r"training.audio: .* has no audio tower"):
        job(None, audio={"per_sample": 1, "seconds": [10]})
