"""`zsim needs`, in words and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from zsim.cli import app

ARGUMENTS = [
    "needs", "--model", "gpt2", "--cluster", "dgx-h100", "--gpus", "2",
    "--set", "training.sequence_length=1024", "--set", "strategy.kind=fsdp2",
    "--set", "strategy.cpu_offload=true", "--resource", "cpu", "--resource", "pcie",
]  # fmt: skip


def test_one_sentence_per_resource_and_the_same_as_json(tmp_path: Path) -> None:
    written = tmp_path / "needs.json"
    done = CliRunner().invoke(app, [*ARGUMENTS, "--json", str(written)])
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.replace(str(written), "").splitlines())) <= 80
    found = json.loads(written.read_text())
    assert [need["resource"] for need in found] == ["cpu", "pcie"]
    for need in found:
        assert need["sentence"] in " ".join(done.output.split())
        assert need["is_enough"] == (need["needed"] <= need["available"])
    assert json.loads(CliRunner().invoke(app, [*ARGUMENTS, "--json", "-"]).output) == found
