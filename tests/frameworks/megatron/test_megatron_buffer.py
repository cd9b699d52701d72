"""Megatron's buffer: which parameters share a bucket, where they start, and what a rank owns of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zsim.frameworks.megatron.buffer import make_layout

NUMELS = {"embedding": 1000, "weight": 300, "bias": 10, "norm": 5}


def test_the_last_parameter_comes_first_and_a_full_bucket_is_closed() -> None:
    """norm 5, bias 10, weight 300: 315 elements reach 300; the embedding is a bucket of its own."""
    buffer = make_layout(NUMELS, 300, 4, is_sharded=False)
    assert [bucket.names for bucket in buffer.buckets] == [("norm", "bias", "weight"), ("embedding",)]
    assert [bucket.numel for bucket in buffer.buckets] == [315, 1000]
    assert buffer.ranges["bias"] == (5, 15)


def test_without_a_size_everything_is_one_bucket_without_padding() -> None:
    buffer = make_layout(NUMELS, None, 4, is_sharded=False)
    assert (len(buffer.buckets), buffer.numel) == (1, 1315)


def test_sharded_parameters_start_at_64s_and_buckets_end_at_multiples_of_128_and_the_ranks() -> None:
    """norm at 0, bias at 64, weight at 128 to 428, which is 300 or more; of 6 ranks the multiple is
    lcm(6, 128) = 384, so 768. The embedding's 1,000 behind it end at 1,768, the bucket at 1,920."""
    buffer = make_layout(NUMELS, 300, 6, is_sharded=True)
    assert buffer.ranges == {"norm": (0, 5), "bias": (64, 74), "weight": (128, 428), "embedding": (768, 1768)}
    assert [(bucket.start, bucket.end) for bucket in buffer.buckets] == [(0, 768), (768, 1920)]


def test_a_rank_owns_an_equal_part_of_every_bucket() -> None:
    """Shards of 128 and 192: the first rank has norm and bias (of 0 to 128) and 192 of the embedding, the
    second the weight's first 128 and 192 more, the sixth nothing of the weight's and 40 of the embedding's
    last (1,728 to 1,768)."""
    buffer = make_layout(NUMELS, 300, 6, is_sharded=True)
    assert [buffer.pieces(6)[rank] for rank in (0, 1, 5)] == [[5, 10, 192], [128, 192], [40]]


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=30),
    st.integers(1, 6000) | st.none(),
    st.sampled_from([1, 2, 6, 8]),
    st.booleans(),
)
def test_every_element_is_in_one_bucket_and_updated_by_one_rank(
    numels: list[int], bucket_size: int | None, ranks: int, is_sharded: bool
) -> None:
    named = {str(number): numel for number, numel in enumerate(numels)}
    buffer = make_layout(named, bucket_size, ranks, is_sharded=is_sharded)
    assert [name for bucket in buffer.buckets for name in bucket.names] == list(named)[::-1]
    assert all(end - start == named[name] for name, (start, end) in buffer.ranges.items())
    if is_sharded:
        assert sum(map(sum, buffer.pieces(ranks))) == sum(numels)
