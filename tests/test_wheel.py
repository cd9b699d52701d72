"""The wheel: pure Python, whole, and at work where nothing else of the repository is."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_WINDOWS_FORBIDS = set('<>:"|?*\\')

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="needs hatchling: pip install zsim[dev]"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


def test_the_wheel_is_for_any_platform(wheel: Path) -> None:
    """Nothing compiled, no name that Windows refuses, no two names that differ by their case alone."""
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith((".so", ".pyd", ".dll", ".dylib", ".pyc"))] == []
    assert [name for name in names if _WINDOWS_FORBIDS & set(name)] == []
    assert len({name.lower() for name in names}) == len(names)


def test_every_file_of_the_package_and_every_topology_is_in_the_wheel(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    own = {file.relative_to(ROOT) for file in (ROOT / "zsim").rglob("*") if "__pycache__" not in file.parts}
    shipped = {Path("zsim") / file.relative_to(ROOT) for file in (ROOT / "topologies").rglob("*")}
    expected = {name.as_posix() for name in own | shipped if not name.name.startswith(".")}
    expected = {name for name in expected if "." in Path(name).name}  # files, not folders
    assert len(expected) > 500
    assert expected - held == set()


def test_it_installs_without_a_network_and_runs_on_its_own(wheel: Path, tmp_path: Path) -> None:
    """Only the wheel: no index, none of the repository's files on the path."""
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", "site", str(wheel)]
    subprocess.run(pip, cwd=tmp_path, check=True, capture_output=True)
    place = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PYTHONSAFEPATH": "1"}
    where = [sys.executable, "-c", "import zsim; print(zsim.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=place, check=True, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(tmp_path)
    run = [sys.executable, "-m", "zsim", "run", "--cluster", "dgx-superpod-h100", "--model", "gpt2"]
    done = subprocess.run(
        [*run, "--nodes", "2", "--out", "out"], cwd=tmp_path, env=place, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {"report.html", "report.json"} <= {file.name for file in (tmp_path / "out").iterdir()}
