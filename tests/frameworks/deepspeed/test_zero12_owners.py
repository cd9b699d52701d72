"""Slices of buckets by owner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zsim.frameworks.deepspeed.stage12.partition_owners import BucketCall, FlatGroup, FlatGroups

# 4 + 6 + 2 = 12 elements on 3 ranks: rank 0 owns a; 1 the first 4 of b; 2 the rest of b, and c.
NUMELS = {"a": 4, "b": 6, "c": 2}


def flat(*, is_dealt_out: bool = False, world_size: int = 3, shard_numel: int = 4) -> FlatGroup:
    return FlatGroup(NUMELS, world_size, shard_numel, is_round_robin=is_dealt_out)


def test_a_bucket_is_cut_where_owners_change_and_joined_where_they_do_not() -> None:
    """Gradients come last first: c of rank 2, then b, which begins with rank 1's part."""
    assert list(flat().slices(["c", "b", "a"])) == [(2, 2), (1, 4), (2, 2), (0, 4)]
    assert list(flat().slices(["b", "c"])) == [(1, 4), (2, 2 + 2)]


def test_dealt_out_parameters_lie_one_in_as_many_ranks_apart() -> None:
    """On 2 ranks a and c go first, then b: a at 0, c at 4, b at 6; each rank owns 6."""
    dealt = flat(is_dealt_out=True, world_size=2, shard_numel=6)
    assert dealt.offsets == {"a": 0, "c": 4, "b": 6}
    assert list(dealt.slices(["c", "b", "a"])) == [(0, 2), (1, 6), (0, 4)]


def test_every_owner_is_sent_its_slices_in_one_call() -> None:
    calls = FlatGroups([flat()]).reduces(["c", "b", "a"], bucket_numel=12)
    assert calls == [BucketCall(2 + 2, 2), BucketCall(4, 1), BucketCall(4, 1)]


def test_what_begins_or_ends_in_a_stretch_is_kept_whole() -> None:
    """b lies on ranks 1 and 2; rank 2 has c too."""
    assert flat().largest_overlap_numel() == max(4, 6, 6 + 2)


def test_one_all_reduce_unless_slices_exceed_the_bucket() -> None:
    """c and rank 1's part of b are 6: more than 5, and sent; the rest of b and a are 6 again."""
    groups = FlatGroups([flat()])
    assert groups.all_reduces(["c", "b", "a"], bucket_numel=12) == [BucketCall(12, 4)]
    assert groups.all_reduces(["c", "b", "a"], bucket_numel=5) == [BucketCall(6, 2), BucketCall(6, 2)]


def test_experts_in_a_bucket_are_reduced_over_their_own_ranks() -> None:
    """x, of experts that two ranks have, lies between c and b: a slice for each, as c and b no longer
    touch."""
    experts = FlatGroup({"x": 6}, 2, 3, is_round_robin=False, group="expert_data")
    groups = FlatGroups([flat(), experts])
    names = ["c", "x", "b", "a"]
    assert groups.slices(names) == [(0, 2, 2), (1, 0, 3), (1, 1, 3), (0, 1, 4), (0, 2, 2), (0, 0, 4)]
    assert groups.all_reduces(names, bucket_numel=99) == [BucketCall(12, 4), BucketCall(6, 2, "expert_data")]
    assert [call.group for call in groups.reduces(names, bucket_numel=99)] == [
        "",
        *["expert_data"] * 2,
        "",
        "",
    ]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 40), st.booleans()
)
def test_nothing_is_lost(numels: list[int], world_size: int, bucket: int, is_dealt_out: bool) -> None:
    names = {str(number): numel for number, numel in enumerate(numels)}
    group = FlatGroup(names, world_size, -(-sum(numels) // world_size), is_round_robin=is_dealt_out)
    groups = FlatGroups([group])
    for calls in (groups.reduces(names, bucket), groups.all_reduces(names, bucket)):
        assert sum(call.numel for call in calls) == sum(numels)
        assert sum(call.slices for call in calls) == len(list(group.slices(names)))


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 60), st.booleans()
)
def test_counting_slices_is_cutting_them(
    numels: list[int], world_size: int, bucket: int, is_dealt_out: bool
) -> None:
    """Two groups, whose parameters alternate in the bucket; what exceeds no bucket is one call each."""
    every = {str(number): numel for number, numel in enumerate(numels)}
    halves = [dict(list(every.items())[number::2]) for number in (0, 1)]
    groups = [
        FlatGroup(
            half, world_size, -(-sum(half.values()) // world_size), is_round_robin=is_dealt_out, group=name
        )
        for half, name in zip(halves, ("", "expert_data"), strict=True)
        if half
    ]
    both = FlatGroups(groups)
    names = sorted(every, reverse=True)
    slices = both.slices(names)
    assert both.num_slices(names) == len(slices)
    for group, half in zip(groups, halves, strict=False):
        cut = list(group.slices(half))
        assert group.count_slices(half) == (len(cut), sum(numel for _, numel in cut))
    by_name = {group.group: [0, 0] for group in groups}
    for number, _, numel in slices:
        by_name[groups[number].group][0] += numel
        by_name[groups[number].group][1] += 1
    if all(numel <= bucket for numel, _ in by_name.values()):
        calls = {call.group: [call.numel, call.slices] for call in both.all_reduces(names, bucket)}
        assert calls == by_name
