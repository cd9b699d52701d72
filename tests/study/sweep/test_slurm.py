"""The Slurm cluster of docs/studies.md, with a stand-in for sbatch that runs the job here (dask-jobqueue)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zsim.study.sweep.study_file import load_study
from zsim.study.sweep.sweep import run_sweep

pytest.importorskip("dask_jobqueue", reason="needs dask-jobqueue")

PAGE = Path(__file__).parents[3] / "docs" / "studies.md"
SUBMIT = (
    '#!/bin/bash\nbash "$1" >/dev/null 2>&1 &\necho $! >> "{folder}/jobs"\necho "Submitted batch job $!"\n'
)
STUDY = """
[base]
model = "llama-3.2-1b"
cluster = "dgx-h100"
[axes]
nodes = [1, 2]
"""


def script() -> str:
    block = re.search(r"```python\n(import time\n\nfrom dask_jobqueue.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    return block[1]


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """(address, job script) of the page's cluster, one job of one worker."""
    for name, text in (("sbatch", SUBMIT.format(folder=tmp_path)), ("scancel", "#!/bin/bash\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    small = (
        script().replace("cores=16, processes=16", "cores=1, processes=1").replace("jobs=8)", "jobs=1)", 1)
    )
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    running = subprocess.Popen(
        [sys.executable, "-c", small], stdout=subprocess.PIPE, text=True, env={**os.environ, **paths}
    )
    try:
        assert running.stdout is not None
        lines = []
        for line in running.stdout:
            lines.append(line)
            if line.startswith("scheduler "):
                break
        yield lines[-1].split()[1], "".join(lines[:-1])
    finally:
        running.terminate()
        running.wait()
        jobs = tmp_path / "jobs"
        for number in jobs.read_text().split() if jobs.exists() else []:
            subprocess.run(["pkill", "-P", number], check=False)


def test_the_documented_cluster_runs_a_study(scheduler: tuple[str, str], tmp_path: Path) -> None:
    address, job = scheduler
    for option in ("-p cpu", "-A research", "--cpus-per-task=1", "-t 01:00:00"):
        assert f"#SBATCH {option}" in job
    (tmp_path / "study.toml").write_text(STUDY)
    study = load_study(tmp_path / "study.toml")
    done = run_sweep(study, tmp_path / "out", jobs=1, backend="dask", scheduler=address)
    assert (done.done, done.failed) == (2, 0)
