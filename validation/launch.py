"""Start ranks as processes of this machine, and end them.

    results = run("validation.training:train", world_size=2, arguments=(case,), timeout=120)

One fresh interpreter imports torch once and forks the ranks, so eight ranks start as fast as one. Every
rank writes its result to a file before anything can go wrong at the end, then waits for the others,
destroys its process group and leaves without running torch's destructors.

# [Note: ranks always end]
- a rank dies with its launcher (`PR_SET_PDEATHSIG`), and the launcher with whoever called `run`;
- the launcher is a session of its own, killed as a whole when time is up or the caller is interrupted;
- a rank that fails leaves its traceback in its result file, and the others get a few seconds to notice that
  by themselves (gloo tells them: the connection is closed) before they are ended.

# [Note: first touch]
A page that a process writes for the first time must be found and cleared, and on a virtual machine the host
must find one too: 14 us each of 4 kB, measured, 3.5 ms a megabyte. A step that finds its memory new takes
half as long again, and one whose heap grows by one reduction buffer 60 ms more; a training of hours has
neither. With `touched_bytes` a rank writes so much of its heap before it begins, and `MALLOC` keeps it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
# Otherwise glibc returns the pages of every large tensor and faults them in again.
MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "67108864",
}
GRACE_SECONDS = 20.0


class RankError(Exception):
    """One or more ranks failed; `outcomes` has each rank's result or traceback."""

    def __init__(self, message: str, outcomes: list[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: with a value, an error's text, or a signal."""

    rank: int
    exit_code: int | None
    value: Any = None
    error: str | None = None


@dataclass(frozen=True)
class Job:
    """The launcher's job. With a `link_rate` ("1gbit") each rank is a node with its own link, and the
    launcher must run in a private network (`prefix=network.PRIVATE`). The ranks are started `rounds` times;
    the results are the last round's, a failure in any round counts."""

    function: str
    world_size: int
    arguments: tuple[Any, ...]
    backend: str = "gloo"
    link_rate: str = ""
    rounds: int = 1
    collective_timeout: float = 60.0
    touched_bytes: int = 0  # [Note: first touch]
    environment: dict[str, str] = field(default_factory=dict)


def run(
    function: str,
    world_size: int,
    arguments: Sequence[Any] = (),
    *,
    timeout: float = 120.0,
    prefix: Sequence[str] = (),
    **options: Any,
) -> list[Any]:
    """Run `module:function(rank, world_size, *arguments)` on every rank; returns the results by rank.

    `prefix` goes before the launcher's command (`("unshare", "-n")`). Raises RankError if any rank fails.
    """
    outcomes = run_outcomes(function, world_size, arguments, timeout=timeout, prefix=prefix, **options)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        first = failed[0]
        raise RankError(f"rank {first.rank} of {world_size} failed:\n{first.error}", outcomes)
    return [outcome.value for outcome in outcomes]


def run_outcomes(
    function: str,
    world_size: int,
    arguments: Sequence[Any] = (),
    *,
    timeout: float = 120.0,
    prefix: Sequence[str] = (),
    **options: Any,
) -> list[Outcome]:
    """Like `run`, but failures are returned as outcomes."""
    with tempfile.TemporaryDirectory(prefix="zsim-ranks-") as folder:
        job = Job(function, world_size, tuple(arguments), **options)
        (Path(folder) / "job").write_bytes(pickle.dumps(job))
        environment = {
            **os.environ,
            **MALLOC,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            **job.environment,
        }
        with open(Path(folder) / "log", "w") as log:
            launcher = subprocess.Popen(
                [*prefix, sys.executable, "-m", "validation.launch", folder],
                env=environment,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            try:
                launcher.wait(timeout)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _end_session(launcher)
        return [_outcome(Path(folder), rank, launcher.returncode) for rank in range(world_size)]


def _end_session(launcher: subprocess.Popen[bytes]) -> None:
    if launcher.poll() is None:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def _outcome(folder: Path, rank: int, launcher_code: int | None) -> Outcome:
    status = folder / f"exit-{rank}"
    code = int(status.read_text()) if status.exists() else None
    result = folder / f"result-{rank}"
    if result.exists():
        value, error = pickle.loads(result.read_bytes())
        if error is None and code != 0:
            error = f"gave its result and then ended with {code}"
        return Outcome(rank, code, value, error)
    log = (folder / "log").read_text()[-4000:]
    if code is None:
        return Outcome(rank, None, error=f"did not end; the launcher ended with {launcher_code}:\n{log}")
    return Outcome(rank, code, error=f"ended with {code} and left no result:\n{log}")


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies. [Note: ranks always end]"""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# -- in the launcher ---------------------------------------------------------------------------------


def _launch(folder: Path) -> int:
    job: Job = pickle.loads((folder / "job").read_bytes())
    module = importlib.import_module(job.function.partition(":")[0])  # and torch with it, once
    function = getattr(module, job.function.partition(":")[2])
    return max(_round(folder, job, number, function) for number in range(job.rounds))


def _round(folder: Path, job: Job, number: int, function: Any) -> int:
    """Start all ranks once and wait for them to end; returns 1 if one failed."""
    children, failed = {}, 0
    ready, go = os.pipe(), os.pipe()
    for rank in range(job.world_size):
        pid = os.fork()
        if pid == 0:
            _rank(folder, job, number, rank, function, ready[1], go[0])
        children[pid] = rank
    if job.link_rate:
        _connect(list(children), job.link_rate, ready[0], go[1])
    deadline = None
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if deadline is not None and time.monotonic() > deadline:
                for child in children:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.005)
            continue
        rank, code = children.pop(pid), os.waitstatus_to_exitcode(status)
        if code != 0:
            failed = 1
            deadline = deadline or time.monotonic() + GRACE_SECONDS
        exit_file = folder / f"exit-{rank}"
        if not exit_file.exists() or exit_file.read_text() == "0":  # a failure stays
            exit_file.write_text(str(code))
    return failed


def _connect(pids: list[int], rate: str, ready: int, go: int) -> None:
    """Give each rank its link, once all of them have left the launcher's network."""
    from validation import network

    network.make_bridge()
    for _ in pids:
        os.read(ready, 1)
    for number, pid in enumerate(pids):
        network.connect(pid, number, rate)
    os.write(go, b"x" * len(pids))


def _rank(folder: Path, job: Job, number: int, rank: int, function: Any, ready: int, go: int) -> NoReturn:
    """A forked rank's whole life; does not return."""
    die_with_parent()
    code, value, error = 0, None, None
    try:
        if job.link_rate:
            from validation import network

            network.leave_network()
            os.write(ready, b"x")
            os.read(go, 1)
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        value = _call(f"file://{folder}/store-{number}", job, rank, function)
    except BaseException:
        code, error = 1, traceback.format_exc()
    partial = folder / f"result-{rank}.partial"
    partial.write_bytes(pickle.dumps((value, error)))
    partial.rename(folder / f"result-{rank}")
    if code == 0:
        _leave_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _call(rendezvous: str, job: Job, rank: int, function: Any) -> Any:
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    bytearray(job.touched_bytes)  # written with zeros, and freed
    if job.backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        job.backend,
        init_method=rendezvous,
        rank=rank,
        world_size=job.world_size,
        timeout=datetime.timedelta(seconds=job.collective_timeout),
    )
    return function(rank, job.world_size, *job.arguments)


def _leave_group() -> None:
    """Destroy the process group on all ranks together; a process that ends with its group alive may abort."""
    import torch.distributed as dist

    try:
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError:
        pass  # another rank failed, and reports it


if __name__ == "__main__":
    sys.exit(_launch(Path(sys.argv[1])))
