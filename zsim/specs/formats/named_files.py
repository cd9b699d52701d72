"""Files that a training file names by a path, which its program looks up from wherever it was started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from zsim.errors import InputError

_REPOSITORY = (".git", "pyproject.toml", "setup.py")
_MAX_FOLDERS = 12


def locate_named_file(name: str, folder: Path, where: str, expected: str) -> Path:
    """The file that a training file in `folder` names at `where`.

    It is looked for from the folder itself, from those around it up to the root of its repository, and from
    the working folder, in this order. Raises InputError that names every place that was tried.
    """
    tried: list[Path] = []
    for start in _starts(folder):
        candidate = start / os.path.expanduser(name)
        if candidate in tried:
            continue
        if os.path.isfile(candidate):
            return candidate
        tried.append(candidate)
    candidates = ", ".join(str(candidate) for candidate in tried)
    raise InputError(f"{where}: '{name}': no such file; expected {expected}; tried {candidates}")


def _starts(folder: Path) -> Iterator[Path]:
    absolute = folder.absolute()
    yield folder
    folders = [absolute, *absolute.parents][:_MAX_FOLDERS]
    roots = [
        number for number, entry in enumerate(folders) if any((entry / mark).exists() for mark in _REPOSITORY)
    ]
    if roots:
        yield from folders[1 : roots[0] + 1]
    yield Path()
