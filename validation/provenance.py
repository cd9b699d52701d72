"""Provenance of a recorded file: command, versions, machine class, date."""

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
    """The information needed to reproduce the file. The machine is described by class, not by name."""
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": f"{os.cpu_count()} x {_cpu_model()}, {platform.system()} {_kernel()}",
        **more,
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "deepspeed", "transformers", "peft"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _kernel() -> str:
    return ".".join(platform.release().split(".")[:2])


def _cpu_info(key: str) -> str:
    """Linux's value for the first core; "" if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), "")


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.machine()


def machine_folder(gpu: str = "") -> str:
    """The name of the machine's class in `traces/`: "h200", or "cpu-2core-epyc-7763" without a GPU; with
    family and model ("cpu-2core-epyc-25-1") if a virtual machine hides the model number."""
    name = _words_of(_cpu_model())
    if name and not any(letter.isdigit() for letter in name):
        name = "-".join([name, *filter(None, (_cpu_info("cpu family"), _cpu_info("model")))])
    cpu = f"cpu-{os.cpu_count()}core-{name}"
    return _words_of(gpu) if gpu else cpu.rstrip("-")


def _words_of(name: str) -> str:
    """The words of a device's name: "NVIDIA H200" -> "h200"; "AMD EPYC 7763 64-Core Processor" ->
    "epyc-7763"."""
    plain = re.sub(r"\((r|tm)\)|@.*|\d+-core", " ", name.lower())
    noise = {"nvidia", "amd", "intel", "cpu", "processor"}
    return "-".join(word for word in re.findall(r"[a-z0-9]+", plain) if word not in noise)


def write_checksums(folder: Path) -> None:
    """Write `SHA256SUMS` of every file below `folder`, in the format of `sha256sum -c`."""
    rows = [f"{digest}  {name}" for name, digest in checksums(folder).items()]
    (folder / "SHA256SUMS").write_text("\n".join(rows) + "\n")


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of all recorded files (not the README or the sums themselves), by path below `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in (".json", ".gz"))
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
