"""Published saves and loads: every row has a prediction or a reason, and the page is what the script says."""

from __future__ import annotations

from validation.published.checkpoints import PAGE, described, page, rows


def test_every_published_row_is_predicted_or_left_out_for_a_reason() -> None:
    known = described()
    reasons = [number for numbers in known["reasons"].values() for number in numbers]
    assert sorted([*known["predicted"], *reasons]) == sorted(rows())
    assert all(row["role"] == "report" for row in rows().values())


def test_no_store_has_its_rate_from_the_row() -> None:
    """A rate that is bytes over the row's time would be its own answer."""
    for entry in described()["predicted"].values():
        assert "storage" not in entry or entry["storage"]["source"]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page()
