"""Run many points on many processes, through joblib: loky's processes on this machine, or another backend.

# [Note: a worker that dies]
Workers write each record to disk as soon as it is done, and mark the point that they are working on. When a
worker is killed, joblib ends the others and drops everything under way. Records on disk are then loaded, the
points that workers were at become suspects, and the rest continues. Suspects run at the end, one at a time. A
suspect whose worker dies twice more gets an error as its record. That record is not saved, so the next run
tries the point anew.

# [Note: workers end with the study]
SIGTERM and SIGHUP end a study as Ctrl-C does. After SIGKILL a process can do nothing more, so every worker
checks once a second whether the process that started it is still its parent.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from zsim.engine.simulator import Simulator
from zsim.errors import InputError
from zsim.extras import require
from zsim.specs.experiment.tables import Experiment
from zsim.study.sweep.records import Record, Store, failed_record, point_record

_LARGEST_BATCH = 16
_BATCHES_PER_JOB = 8
_MAX_DEATHS = 2
_SECONDS_BETWEEN_LOOKS = 1.0  # of a worker at its parent
_STOPS = ("SIGTERM", "SIGHUP")  # Windows has the first alone
OnRecord = Callable[[Record], None]


class Task(NamedTuple):
    """One point to run."""

    identity: str
    experiment: Experiment


def run_tasks(
    tasks: Sequence[Task],
    folder: Path,
    on_record: OnRecord,
    *,
    jobs: int,
    backend: str = "loky",
    scheduler: str | None = None,
    simulator: Simulator | None = None,
) -> None:
    """Run every task and pass each record to `on_record` in order of completion. Records are saved in
    `folder`. Tasks that run in this process use `simulator`.

    `backend` is joblib's name ("loky", "dask", "multiprocessing", "threading", ...). `scheduler` is the
    address of a running Dask scheduler. Without it Dask runs `jobs` processes here.

    KeyboardInterrupt leaves every finished point on disk. SIGTERM and SIGHUP raise it.
    """
    store, remaining = Store(folder), {task.identity: task for task in tasks}
    # Processes of this machine share the folder; those of a cluster may not.
    is_local = backend in ("loky", "multiprocessing", "threading", "sequential") or jobs == 1

    def finish(record: Record) -> None:
        if remaining.pop(record["identity"], None) is not None:
            if record.get("is_kept", True) and not is_local:
                store.save(record)
            on_record(record)

    with _raise_on_stop_signals(), _open_pool(backend, jobs, scheduler, simulator or Simulator()) as parallel:

        def run(selected: Sequence[Task], size: int) -> bool:
            """Run the selected tasks. Returns whether no worker died."""
            batches = [list(selected[start : start + size]) for start in range(0, len(selected), size)]
            try:
                for records in parallel(batches, folder if is_local else None):
                    for record in records:
                        finish(record)
            except Exception as error:
                if not _is_death(error):
                    raise
                for identity in [*remaining]:
                    kept_record = store.load(identity)
                    if kept_record is not None:
                        finish(kept_record)
                return False
            return True

        suspects: dict[str, Task] = {}
        while len(remaining) > len(suspects):
            selected = [task for identity, task in remaining.items() if identity not in suspects]
            # In small batches, because handing over a task costs as much as a small simulation.
            size = max(1, min(_LARGEST_BATCH, len(selected) // (jobs * _BATCHES_PER_JOB)))
            if not run(selected, size):
                suspects |= {
                    identity: remaining[identity] for identity in _suspects(store, remaining, is_local)
                }
        for identity, task in suspects.items():
            if not any(run([task], 1) for _ in range(_MAX_DEATHS)):
                message = f"the process that ran it died {_MAX_DEATHS} times (killed, or out of memory?)"
                finish(failed_record(identity, "WorkerDied", message) | {"is_kept": False})


def run_batch(
    tasks: Sequence[Task],
    folder: Path | None,
    simulator: Simulator | None = None,
    where: Path | None = None,
    study: int | None = None,
) -> list[Record]:
    """Simulate the tasks one after the other in a worker, sharing their common work. `where` is the study's
    current folder, where relative paths begin, those of models too. `study` is the study's process: a worker
    that it started ends with it.
    """
    if study is not None and os.getppid() == study:
        _exit_after_parent(study)
    if where is not None:
        with suppress(OSError):  # another machine has no such folder
            os.chdir(where)  # joblib keeps its processes, and with them the folder that they were started in
    simulator = simulator or Simulator()
    store = None if folder is None else Store(folder)
    records = []
    for task in tasks:
        if store is not None:
            store.mark(task.identity)
        record = point_record(task.identity, task.experiment, simulator)
        if store is not None:
            if record.get("is_kept", True):
                store.save(record)
            store.unmark(task.identity)
        records.append(record)
    return records


def _worker_options(backend: str) -> dict[str, Any]:
    """The options by which loky's workers watch their study. Workers of other backends begin to watch with
    their first batch.
    """
    return {"initializer": _exit_after_parent, "initargs": (os.getpid(),)} if backend == "loky" else {}


_WATCH = "end with the study"


def _exit_after_parent(parent: int) -> None:
    """End this process once its parent, the process `parent`, is gone."""
    if any(thread.name == _WATCH for thread in threading.enumerate()):
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    threading.Thread(target=watch, name=_WATCH, daemon=True).start()


@contextmanager
def _raise_on_stop_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread, unless they are ignored (nohup)."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in _STOPS if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {number: signal.getsignal(number) for number in numbers}
    changed = [number for number, handler in before.items() if handler is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number])


def _suspects(store: Store, remaining: dict[str, Task], is_local: bool) -> list[str]:
    """The points that dead workers were at, or all remaining points if workers leave no marks."""
    if not is_local:
        return [*remaining]
    marked = store.running()
    for identity in marked:
        store.unmark(identity)
    return [identity for identity in remaining if identity in marked]


def _is_death(error: BaseException) -> bool:
    """Whether the error means that a worker died, not that the code failed."""
    from concurrent.futures.process import BrokenProcessPool

    return isinstance(error, BrokenProcessPool) or type(error).__name__ in (
        "TerminatedWorkerError", "KilledWorker", "FutureCancelledError", "CancelledError",
    )  # fmt: skip


Parallel = Callable[[list[list[Task]], Path | None], Iterator[list[Record]]]


@contextmanager
def _open_pool(backend: str, jobs: int, scheduler: str | None, simulator: Simulator) -> Iterator[Parallel]:
    """A pool of joblib with one backend, ready to run batches."""
    if scheduler is not None and backend != "dask":
        raise InputError(f"--scheduler {scheduler}: is for --backend dask, found {backend}")
    if jobs == 1 and backend == "loky":
        yield lambda batches, folder: (run_batch(batch, folder, simulator) for batch in batches)
        return
    import joblib

    with _dask_client(jobs, scheduler) if backend == "dask" else nullcontext():
        try:
            config = joblib.parallel_config(
                backend=backend, n_jobs=-1 if backend == "dask" else jobs, **_worker_options(backend)
            )
        except (ValueError, ImportError) as error:
            raise InputError(f"--backend {backend}: joblib does not know it: {error}") from None
        with config:
            where = Path(os.curdir).absolute()

            def parallel(batches: list[list[Task]], folder: Path | None) -> Iterator[list[Record]]:
                run: Any = joblib.Parallel(return_as="generator_unordered", batch_size=1, max_nbytes=None)
                with _block_interrupts():
                    calls = (
                        joblib.delayed(run_batch)(batch, folder, None, where, os.getpid())
                        for batch in batches
                    )
                    return iter(run(calls))

            yield parallel


@contextmanager
def _dask_client(jobs: int, scheduler: str | None) -> Iterator[None]:
    require("distributed", "--backend dask")
    from distributed import Client, LocalCluster

    if scheduler is not None:
        try:
            client = Client(scheduler, timeout=20)
        except (OSError, ValueError, TimeoutError) as error:
            raise InputError(f"--scheduler {scheduler}: no Dask scheduler answers there: {error}") from None
        with client:
            yield
        return
    options: dict[str, Any] = {"threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with _block_interrupts():
        cluster = LocalCluster(n_workers=jobs, **options)
    with cluster, Client(cluster):
        yield


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Block SIGINT while processes are started, so that they inherit the mask and Ctrl-C reaches only this
    process, afterwards. Python's resource tracker would unblock SIGINT when it starts, so it is started
    first.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
