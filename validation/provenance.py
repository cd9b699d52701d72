"""Where a recorded file comes from: command, versions, machine class, date."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any


def provenance(command: str, **more: Any) -> dict[str, Any]:
    """What a reader needs to make the file again. The machine is described by class, not by name."""
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": f"{os.cpu_count()} x {_cpu_model()}, {platform.system()} {_kernel()}",
        **more,
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "deepspeed"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _kernel() -> str:
    return ".".join(platform.release().split(".")[:2])


def _cpu_info(key: str) -> str:
    """What Linux says of the first core; "" where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), "")


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.machine()


def machine_folder(gpu: str = "") -> str:
    """What `traces/` calls a class of machine: "h200", or "cpu-2core-epyc-7763" without a GPU; family and
    model ("cpu-2core-epyc-25-1") where a virtual machine keeps the number to itself."""
    name = _words_of(_cpu_model())
    if name and not any(letter.isdigit() for letter in name):
        name = "-".join([name, *filter(None, (_cpu_info("cpu family"), _cpu_info("model")))])
    cpu = f"cpu-{os.cpu_count()}core-{name}"
    return _words_of(gpu) if gpu else cpu.rstrip("-")


def _words_of(name: str) -> str:
    """ "NVIDIA H200" -> "h200"; "AMD EPYC 7763 64-Core Processor" -> "epyc-7763"."""
    plain = re.sub(r"\((r|tm)\)|@.*|\d+-core", " ", name.lower())
    noise = {"nvidia", "amd", "intel", "cpu", "processor"}
    return "-".join(word for word in re.findall(r"[a-z0-9]+", plain) if word not in noise)


def write_checksums(folder: Path) -> None:
    """`SHA256SUMS` of every file below `folder`, as `sha256sum -c` reads it."""
    rows = [f"{digest}  {name}" for name, digest in checksums(folder).items()]
    (folder / "SHA256SUMS").write_text("\n".join(rows) + "\n")


def checksums(folder: Path) -> dict[str, str]:
    """Path below `folder` -> SHA-256, for all recorded files (not the README or the sums themselves)."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in (".json", ".gz"))
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
