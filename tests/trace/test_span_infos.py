"""The distinct ops of a trace, and what is derived from them once."""

from __future__ import annotations

import pickle

from zsim.trace.trace import SpanInfo, SpanInfos, kind_mask

INFOS = SpanInfos([SpanInfo("mm", "compute", "compute"), SpanInfo("gather", "all_gather", "nccl")])


def test_what_is_derived_from_ops_is_derived_once() -> None:
    gathers = INFOS.memoize(kind_mask, frozenset({"all_gather"}))
    assert gathers.tolist() == [False, True]
    assert INFOS.memoize(kind_mask, frozenset({"all_gather"})) is gathers


def test_ops_are_sent_to_other_processes_without_what_was_derived() -> None:
    INFOS.memoize(kind_mask, frozenset({"compute"}))
    sent = pickle.loads(pickle.dumps(INFOS))
    assert sent == INFOS
    assert type(sent) is SpanInfos
    assert not sent._derived
