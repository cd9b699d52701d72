"""What programs that record DeepSpeed's calls have in common: their options, and the file that they write."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from validation.provenance import provenance, write_checksums

NOT_INSTALLED = 3  # exit code


def options_of(words: Sequence[str], name: str) -> argparse.Namespace:
    """`out` and `only` of `python -m validation.deepspeed_calls.NAME`. Exits where DeepSpeed is absent."""
    arguments = argparse.ArgumentParser(prog=f"python -m validation.deepspeed_calls.{name}")
    arguments.add_argument("--out", type=Path, metavar="DIR", help=f"write {name}.json here")
    arguments.add_argument("--only", metavar="TEXT", help="cases with this in their names")
    options = arguments.parse_args(words)
    if importlib.util.find_spec("deepspeed") is None:
        print("SKIPPED: DeepSpeed is not installed (see validation/README.md)", file=sys.stderr)
        sys.exit(NOT_INSTALLED)
    return options


def write_cases(cases: dict[str, Any], folder: Path, name: str) -> None:
    """NAME.json with a line per case, and the checksums of `traces`."""
    command = f"python -m validation.deepspeed_calls.{name}"
    origin = {"format": 1, "provenance": provenance(command, backend="gloo", seed=0)}
    rows = ",\n".join(f"  {json.dumps(case)}: {json.dumps(found)}" for case, found in cases.items())
    (folder / f"{name}.json").write_text(f'{json.dumps(origin)[:-1]},\n "cases": {{\n{rows}\n}}}}\n')
    if folder.parent.name == "traces":
        write_checksums(folder.parent)
