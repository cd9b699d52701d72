"""Files that ship with zsim, and those that it writes: completely or not at all, checked before the work."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from zsim.errors import InputError

_STREAMS = ("/dev/std", "/dev/fd/", "/proc/")  # may lead to a regular file with other writers


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write `content` to a partial file in the same folder and rename that to `path`. Returns `path`.

    A path that is not a regular file (a pipe, /dev/stdout) is written directly, and so is a file in a folder
    in which no file can be made. Raises InputError if it cannot be written. Earlier content is then kept.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    target = Path(os.path.realpath(path))  # a link stays one
    is_there = os.path.exists(path)
    is_stream = str(path.absolute()).startswith(_STREAMS) or (is_there and not os.path.isfile(path))
    try:
        if is_stream or (is_there and not os.access(target.parent, os.W_OK)):
            path.write_bytes(data)
        else:
            if is_there:
                path.open("ab").close()  # a file without permission to write must not be replaced
            _replace(target, data)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def _replace(target: Path, data: bytes) -> None:
    partial = target.with_name(f".zsim-{os.urandom(8).hex()}.partial")
    try:
        partial.write_bytes(data)
        if target.exists():
            shutil.copymode(target, partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def make_folder(folder: Path) -> Path:
    """Make a folder and its parents. Raises InputError if it cannot be made."""
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror}") from None
    return folder


def check_folder(folder: Path) -> None:
    """Raises InputError if a folder neither exists nor can be made, or cannot be written. Makes none."""
    _check_name(folder)
    existing = next((path for path in (folder, *folder.absolute().parents) if os.path.exists(path)), folder)
    if not os.path.isdir(existing):
        raise InputError(f"{folder}: cannot be made: {existing} is a file, expected a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{folder}: cannot be written: {existing} gives no permission to")


def check_file(path: Path) -> None:
    """Raises InputError if a file cannot be written. Writes nothing."""
    _check_name(path)
    if os.path.isdir(path):
        raise InputError(f"{path}: cannot be written: is a folder, expected a file")
    if os.path.exists(path):
        if not os.access(path, os.W_OK):
            raise InputError(f"{path}: cannot be written: it gives no permission to")
        return
    parent = Path(os.path.realpath(path)).parent
    if not os.path.isdir(parent):
        raise InputError(f"{path}: cannot be written: there is no folder {parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{path}: cannot be written: {parent} gives no permission to")


def _check_name(path: Path) -> None:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:  # a name that is too long, a link to itself
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def write_files(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Write {path below `folder`: text}, making folders as needed. Returns the paths."""
    for parent in {(folder / name).parent for name in files}:
        make_folder(parent)
    return [write_atomically(folder / name, text) for name, text in files.items()]


PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent  # of a source checkout; in an installed package, the folder of packages
PRESETS = PACKAGE / "presets"
EXAMPLE = PRESETS / "experiments" / "llama-3-70b-zero3.toml"  # what a bare `zsim run` simulates
TEMPLATES = PACKAGE / "report" / "templates"


@cache
def preset_table(name: str) -> Mapping[str, Any]:
    """The table of a preset that is zsim's own data: `presets/NAME.toml`. Errors in it are ours."""
    return tomllib.loads((PRESETS / f"{name}.toml").read_text(encoding="utf-8"))


def topologies_folder() -> Path:
    """The folder of shipped clusters and GPUs: next to the package in a source checkout, inside it when
    installed."""
    installed = PACKAGE / "topologies"
    return installed if installed.is_dir() else CHECKOUT / "topologies"
