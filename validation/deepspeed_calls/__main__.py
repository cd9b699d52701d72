"""`python -m validation.deepspeed_calls`; see the package."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from validation.deepspeed_calls.configurations import configurations
from validation.launch import run
from validation.provenance import provenance, write_checksums
from validation.record.cases import MODELS, Recording, experiment

BATCH = 16  # configurations per start of the ranks
Found = dict[str, dict[str, Any]]


def record(cases: list[tuple[Recording, str]], ranks: int, found: Found) -> None:
    """Add each configuration's experiment and calls, by "NAME-MODEL-Nranks"."""
    results = run("validation.deepspeed_calls.ranks:calls_of", ranks, (cases,), timeout=600)
    for index, (recording, model) in enumerate(cases):
        calls = results[0][index]
        if any(result[index] != calls for result in results):
            raise RuntimeError(f"{recording.name}-{model}: ranks made different calls")
        name = f"{recording.name}-{model}-{ranks}ranks"
        described = experiment(recording, model, ranks)
        assert described is not None
        found[name] = {"experiment": {**described, "model": model}, "calls": calls}
        print(f"{len(found):4} {name}", flush=True)


def batches(cases: list[tuple[Recording, str]]) -> list[list[tuple[Recording, str]]]:
    """The configurations in batches; those with hpZ run alone, because DeepSpeed makes hpZ's groups once per
    process."""
    alone = [[case] for case in cases if "hpz" in case[0].name]
    rest = [case for case in cases if "hpz" not in case[0].name]
    return [rest[start : start + BATCH] for start in range(0, len(rest), BATCH)] + alone


def write(found: Found, path: Path) -> None:
    """JSON with one line per configuration."""
    origin = provenance("python -m validation.deepspeed_calls", backend="gloo", seed=0)
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    head = f'{{"format": 1,\n "provenance": {json.dumps(origin)},\n "models": {json.dumps(MODELS)},\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head} "configurations": {{\n{rows}\n}}}}\n')


def main(words: list[str]) -> int:
    arguments = argparse.ArgumentParser(prog="python -m validation.deepspeed_calls", description=__doc__)
    arguments.add_argument("--out", type=Path, metavar="DIR", help="write calls.json here")
    arguments.add_argument(
        "--only",
        metavar="TEXT",
        help="configurations with this in their names; others in DIR/calls.json stay",
    )
    arguments.add_argument("--ranks", type=int, action="append", help="2 and 4")
    options = arguments.parse_args(words)
    if importlib.util.find_spec("deepspeed") is None:
        print("SKIPPED: DeepSpeed is not installed (see validation/README.md)", file=sys.stderr)
        return 3
    cases = [case for case in configurations() if (options.only or "") in f"{case[0].name}-{case[1]}"]
    known = options.out / "calls.json" if options.out and options.only else None
    found: Found = json.loads(known.read_text())["configurations"] if known and known.exists() else {}
    for ranks in options.ranks or (2, 4):
        for batch in batches([case for case in cases if case[0].min_ranks <= ranks]):
            record(batch, ranks, found)
    if options.out:
        write(found, options.out / "calls.json")
        if options.out.parent.name == "traces":
            write_checksums(options.out.parent)
    else:
        print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
