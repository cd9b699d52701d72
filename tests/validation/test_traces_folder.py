"""The recorded files as a collection."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from validation.provenance import checksums

TRACES = Path(__file__).parents[2] / "traces"


def test_every_recorded_file_has_the_checksum_that_was_written_down() -> None:
    lines = [line.split("  ", 1) for line in (TRACES / "SHA256SUMS").read_text().splitlines()]
    written = {name: checksum for checksum, name in lines}
    assert checksums(TRACES) == written


def test_every_recorded_file_is_small_and_says_where_it_comes_from() -> None:
    for name in checksums(TRACES):
        path = TRACES / name
        assert path.stat().st_size < 500_000, name
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
        head = json.loads(text.splitlines()[0]) if ".jsonl" in name else json.loads(text)
        assert {"command", "date", "versions", "machine"} <= set(head["provenance"]), name
