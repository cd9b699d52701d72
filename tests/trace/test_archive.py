"""Traces in a tar, as people send them."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

import zsim
from tests.conftest import KinetoBuilder

Mode = Literal["w", "w:gz", "w:bz2", "w:xz"]


def archive(path: Path, files: Mapping[str, bytes], mode: Mode = "w:gz") -> Path:
    """A tar of {name: bytes}; a name that ends in `->` is a link to what its bytes say."""
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name.removesuffix("->"))
            if name.endswith("->"):
                info.type, info.linkname = tarfile.SYMTYPE, content.decode()
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def ranks(kineto: Callable[..., KinetoBuilder], tmp_path: Path) -> dict[str, bytes]:
    """Two ranks' files, the second gzipped."""
    files = {}
    for rank, name in enumerate(("rank0.json", "rank1.json.gz")):
        file = kineto(rank=rank)
        file.step(1, 0, 20)
        file.launch("gemm", 0, 5, 30 + rank)
        files[f"run/{name}"] = file.write(tmp_path / name).read_bytes()
    return files


@pytest.mark.parametrize(("name", "mode"), [("run.tar.gz", "w:gz"), ("run.tgz", "w:gz"), ("run.tar", "w")])
def test_an_archive_is_read_like_a_folder(
    tmp_path: Path, ranks: dict[str, bytes], name: str, mode: Mode
) -> None:
    """What a Mac puts beside files, summaries and notes are no traces."""
    others = {"run/._rank0.json": b"\x00\x05\x16\x07", "run/summary.json": b"{}", "run/notes.txt": b"x"}
    trace = zsim.read_trace(archive(tmp_path / name, {**others, **ranks}, mode))
    assert trace.metadata["ranks"] == (0, 1)
    assert [end - start for _, _, start, end in trace.rows()] == pytest.approx([30e-6, 31e-6])
    assert trace.metadata["files"][0] == str(tmp_path / name / "run" / "rank0.json")


def test_span_logs_of_an_archive_go_before_profiles(tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[2] / "traces" / "gloo" / "zero3-even-2ranks"
    packed = archive(tmp_path / "a.tar", {path.name: path.read_bytes() for path in folder.iterdir()}, "w")
    one, other = zsim.read_trace(packed), zsim.read_trace(folder)
    assert one.step_seconds == other.step_seconds
    assert len(one) == len(other)


def test_nothing_is_written_to_disk(
    tmp_path: Path, ranks: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = archive(tmp_path / "a.tar.gz", ranks)
    before = sorted(tmp_path.rglob("*"))
    zsim.read_trace(path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"rank0.json->": b"/etc/passwd"}, r"a\.tar\.gz/rank0\.json: is a link or a device; expected a file"),
        ({"readme.md": b"x"}, "has no trace in it; expected a file per rank"),
        ({"a.sqlite": b"SQLite format 3\x00...."}, r"a\.sqlite: is read from a file of its own; unpack"),
        ({"rank0.json": b'{"traceEvents": ['}, r"a\.tar\.gz/rank0\.json: is cut off"),
    ],
)
def test_what_cannot_be_read_in_an_archive_is_one_clear_error(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(zsim.InputError, match=message):
        zsim.read_trace(archive(tmp_path / "a.tar.gz", files))


def test_an_archive_that_is_cut_off_says_so(tmp_path: Path, ranks: dict[str, bytes]) -> None:
    path = archive(tmp_path / "a.tar", ranks, "w")
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(zsim.InputError, match=r"a\.tar(/run/rank0\.json)?: (the archive )?is cut off"):
        zsim.read_trace(path)


def test_an_archive_that_unpacks_without_end_is_refused_where_it_does(tmp_path: Path) -> None:
    """3 GB that no trace is in, of which 16 MB are looked at: a header, and zeros packed a thousand times."""
    header = tarfile.TarInfo("large.bin")
    header.size = 3 * 2**30
    zeros = gzip.compress(bytes(2**20))
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(header.tobuf()) + zeros * 3072)
    with pytest.raises(zsim.InputError, match="unpacks to more than 200 times its size"):
        zsim.read_trace(path)
