"""Files are written whole or not at all; what cannot be written is told before the work."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from zsim.errors import InputError
from zsim.files import check_file, check_folder, make_folder, write_atomically


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file may become longer, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_failed_write_leaves_the_good_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("good")
    with room_for(4096), pytest.raises(InputError, match=r"r\.json: cannot be written: File too large"):
        write_atomically(path, "x" * 10_000)
    assert path.read_text() == "good"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_keeps_its_mode_and_a_link_its_file(tmp_path: Path) -> None:
    path, link = tmp_path / "r.json", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    assert write_atomically(link, "new") == link
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_name_of_255_characters_can_be_written(tmp_path: Path) -> None:
    path = write_atomically(tmp_path / ("x" * 255), b"all")
    assert path.read_bytes() == b"all"


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(path, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert path.is_fifo()


def test_a_device_is_written_as_it_is() -> None:
    assert write_atomically(Path("/dev/null"), "gone") == Path("/dev/null")
    assert Path("/dev/null").is_char_device()


def test_a_file_behind_standard_output_is_not_replaced(tmp_path: Path) -> None:
    """/dev/fd/N leads to a regular file that others hold open: a replaced one would lose what they write."""
    with (tmp_path / "log").open("w") as file:
        write_atomically(Path(f"/dev/fd/{file.fileno()}"), "all")
        assert os.fstat(file.fileno()).st_ino == (tmp_path / "log").stat().st_ino
    assert (tmp_path / "log").read_text() == "all"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_that_is_not_to_be_written_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("kept")
    path.chmod(0o400)
    with pytest.raises(InputError, match="cannot be written: Permission denied"):
        write_atomically(path, "new")
    assert path.read_text() == "kept"


def test_a_target_that_cannot_be_is_told_before_anything_is_written(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_text("here")
    with pytest.raises(InputError, match=r"file\.txt is a file, expected a folder"):
        check_folder(file / "deep")
    with pytest.raises(InputError, match=r"file\.txt is a file, expected a folder"):
        make_folder(file)
    with pytest.raises(InputError, match="is a folder, expected a file"):
        check_file(tmp_path)
    with pytest.raises(InputError, match=r"there is no folder .*absent"):
        check_file(tmp_path / "absent" / "r.json")
    for check in (check_file, check_folder):
        with pytest.raises(InputError, match="cannot be written: File name too long"):
            check(tmp_path / ("x" * 256))
    check_file(file)
    check_file(tmp_path / "new.json")
    check_folder(tmp_path / "new" / "deep")
    assert list(tmp_path.iterdir()) == [file]
