"""How NCCL cuts a tensor for its trees, worked out by hand from src/enqueue.cc."""

from __future__ import annotations

import pytest

from zsim.cost.collectives.rounds import Rounds, fill_seconds, tree_pieces

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.mark.parametrize(
    ("protocol", "size", "pieces"),
    [
        ("simple", 0, 1),
        ("simple", 64 * KIB, 1),
        ("simple", 16 * MIB, 16),
        ("simple", 64 * MIB, 64),
        ("simple", 1 * GIB, 128),
        ("ll", 512 * KIB, 1),
        ("ll", 16 * MIB, 32),
        ("ll128", 1 * MIB, 4),
        ("ll128", 16 * MIB, 15),
        ("ll128", 1 * GIB, 117),
    ],
)
def test_pieces_on_16_channels_of_4_nodes_of_8(protocol: str, size: int, pieces: int) -> None:
    """Depth 7 + 2 = 9. Simple: 16 MiB are 1 MiB per channel; 512, 256 and 128 KiB give fewer than 8 x 9
    chunks and 128 KiB fewer than 4 x 9, 64 KiB give 16, more than 9. 64 MiB: 4 MiB in 64 KiB, as 32 of
    128 KiB are fewer than 4 x 9. 1 GiB: 64 MiB in 512 KiB. LL: always 32 KiB. LL128: (1 + 2 + 0.8) / 8 is
    0.475 steps, so 30 chunks above 128 KiB and 7.6 above 32 KiB; 1 MiB is 65,536 bytes per channel in 18,000;
    16 MiB are 1,048,576 in 72,000, which are 14 and so more than 7.6; 1 GiB 67,108,864 in 576,000."""
    assert tree_pieces(protocol, size, 16, 32, 4) == pieces


def test_filling_takes_a_piece_over_every_edge_but_the_slowest() -> None:
    """14 edges inside of 2 s, 4 across of 5 s, 16 pieces: (28 + 20 - 5) / 16."""
    assert fill_seconds(Rounds(14, 4), 2.0, 5.0, 16) == pytest.approx(43 / 16)
    assert fill_seconds(Rounds(0, 1), 0.0, 5.0, 16) == 0.0
