"""`python -m validation.checkpoints`; see the package."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from validation.checkpoints.archives import folder_files
from validation.checkpoints.cases import SAVED_MODELS, SavedCase, saved_cases
from validation.launch import run
from validation.provenance import provenance, write_checksums

Found = dict[str, dict[str, Any]]


def record(cases: list[tuple[SavedCase, str]], ranks: int, found: Found) -> None:
    """Add each configuration's files, by "NAME-MODEL-Nranks"."""
    with tempfile.TemporaryDirectory(prefix="zsim-saves-") as root:
        run("validation.checkpoints.ranks:save_all", ranks, (cases, root), timeout=600)
        for case, model in cases:
            folder = Path(root) / f"{case.name}-{model}"
            inside = next(one for one in sorted(folder.iterdir()) if one.is_dir())
            name = f"{case.name}-{model}-{ranks}ranks"
            found[name] = {"experiment": experiment(case, model, ranks), "checkpoint": case.checkpoint,
                           "files": folder_files(inside)}  # fmt: skip
            print(f"{len(found):4} {name}", flush=True)


def experiment(case: SavedCase, model: str, ranks: int) -> dict[str, Any]:
    """The run as a zsim experiment, without a cluster; the model by its name in `models`."""
    return {
        "model": model,
        "gpus": ranks,
        "training": {"sequence_length": 64, "micro_batch_size": 2, "precision": case.precision,
                     "attention": "math", "optimizer": "adamw"},
        "strategy": case.strategy,
        **({"parallelism": case.parallelism} if case.parallelism else {}),
    }  # fmt: skip


def write(found: Found, path: Path) -> None:
    """JSON with one line per configuration."""
    origin = provenance("python -m validation.checkpoints", backend="gloo", seed=0)
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    head = f'{{"format": 1,\n "provenance": {json.dumps(origin)},\n "models": {json.dumps(SAVED_MODELS)},\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head} "configurations": {{\n{rows}\n}}}}\n')


def main(words: list[str]) -> int:
    arguments = argparse.ArgumentParser(prog="python -m validation.checkpoints", description=__doc__)
    arguments.add_argument("--out", type=Path, metavar="DIR", help="write files.json here")
    arguments.add_argument("--only", metavar="TEXT", help="configurations with this in their names")
    arguments.add_argument("--ranks", type=int, action="append", help="2, 3 and 4")
    options = arguments.parse_args(words)
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    if not has_deepspeed:
        print("DeepSpeed is not installed: its files are left out", file=sys.stderr)
    path = options.out and options.out / "files.json"
    found: Found = {}
    if path and options.only and path.exists():
        found |= json.loads(path.read_text())["configurations"]
    for ranks in options.ranks or (2, 3, 4):
        cases = [
            (case, model)
            for case in saved_cases(with_deepspeed=has_deepspeed)
            for model in case.models
            if ranks in case.ranks and (options.only or "") in f"{case.name}-{model}"
        ]
        if cases:
            record(cases, ranks, found)
    if path:
        write(found, path)
        if options.out.parent.name == "traces":
            write_checksums(options.out.parent)
    else:
        print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
