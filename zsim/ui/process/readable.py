"""The files that the page's process may read.

# [Note: what the page reads]
A setting of the page may come from a link, and names files as an experiment does. The process that works on
settings therefore opens no file but zsim's and Python's, the page's folder, and those that the experiment
names with which the page was started. What is pasted or uploaded arrives as text. Python itself asks before
each file that it opens (`sys.addaudithook`).
"""

from __future__ import annotations

import errno
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zsim.resources import PACKAGE, topologies_folder

_SYSTEM = (
    "/dev/null", "/dev/urandom", "/etc/localtime", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys",
    "/usr/share/zoneinfo",
)  # fmt: skip
_REASON = (
    "zsim ui opens no file that a setting or an uploaded file names; paste the content or upload it, or "
    "start zsim ui with an experiment that names it"
)


class ReadableFiles:
    """The files that this process opens from now on. While it is not sealed it opens all, and
    remembers them.
    """

    def __init__(self, folder: Path, allowed_files: Iterator[str]) -> None:
        self._folders = {os.path.realpath(path) for path in (*_installed_folders(), str(folder), *_SYSTEM)}
        self._files = {os.path.realpath(path) for path in allowed_files}
        self._is_sealed = False
        sys.addaudithook(self._check_open)

    def seal(self) -> None:
        """Refuse all other files from now on."""
        self._is_sealed = True

    def _check_open(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not self._is_sealed:
            self._files.add(path)
        elif path not in self._files and not any(_is_within(path, folder) for folder in self._folders):
            raise PermissionError(errno.EACCES, _REASON, os.fsdecode(arguments[0]))


def named_files(data: Any) -> Iterator[str]:
    """The files that file-shaped data names, in any of its values."""
    if isinstance(data, Mapping):
        for value in data.values():
            yield from named_files(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from named_files(value)
    elif isinstance(data, str) and os.path.isfile(data):
        yield data
    elif isinstance(data, str) and os.path.isfile(os.path.join(data, "config.json")):
        yield os.path.join(data, "config.json")


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _installed_folders() -> Iterator[str]:
    """Python's, its packages' and zsim's folders."""
    yield from (str(PACKAGE), str(topologies_folder()))
    yield from (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    yield from (path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages"))
