"""`python -m validation.pipeline_calls`; see the package."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from validation.pipeline_calls import deepspeed, megatron, nanotron
from validation.provenance import provenance

FRAMEWORKS = {"megatron": megatron, "deepspeed": deepspeed, "nanotron": nanotron}


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m validation.pipeline_calls")
    arguments.add_argument("framework", choices=FRAMEWORKS)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--out", type=Path, required=True)
    given = arguments.parse_args()
    framework = FRAMEWORKS[given.framework]
    version = framework.version(given.folder)
    about = provenance(f"python -m validation.pipeline_calls {given.framework} DIR --out {given.out.name}")
    del about["machine"]  # no order depends on it
    calls = framework.recorded(given.folder)
    written = {"framework": given.framework, "version": version, "provenance": about, "calls": calls}
    given.out.write_bytes(gzip.compress(json.dumps(written, indent=1).encode(), mtime=0))
    print(f"{given.out}: {given.framework} {version}, {len(calls)} configurations")


if __name__ == "__main__":
    main()
