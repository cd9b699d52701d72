"""What a plain install leaves out, and what zsim says where it is missing."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import zsim
from zsim.errors import InputError
from zsim.extras import EXTRA_OF, require

ROOT = Path(__file__).resolve().parents[1]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# zsim where no package of an extra can be imported: an entry of None in sys.modules is "not found"
_PLAIN = (
    "import sys\n"
    f"sys.modules.update(dict.fromkeys({sorted(EXTRA_OF)!r}))\n"
    "from zsim.cli import main\n"
    "main()\n"
)


def plain_zsim(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _PLAIN, *arguments], capture_output=True, text=True, cwd=folder
    )


@pytest.mark.parametrize("package", EXTRA_OF)
def test_an_extra_brings_the_package_that_the_message_promises(package: str) -> None:
    """`dask[distributed]` brings `distributed`; no package of an extra is among those always installed."""
    required = _PROJECT["optional-dependencies"][EXTRA_OF[package]]
    assert any(entry.startswith(package) or f"[{package}]" in entry for entry in required)
    assert not any(entry.startswith(package) for entry in _PROJECT["dependencies"])


def test_every_dependency_has_its_reason_beside_it() -> None:
    lines = (ROOT / "pyproject.toml").read_text().partition("dependencies = [\n")[2].partition("]\n")[0]
    assert [line for line in lines.splitlines() if "  # " not in line] == []


def test_a_missing_package_is_one_sentence_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    result = zsim.simulate(zsim.Experiment(model="gpt2", cluster="dgx-h100", gpus=2))
    with pytest.raises(InputError) as found:
        result.trace.to_frame()
    assert str(found.value) == (
        "Trace.to_frame needs pandas, which is not installed; expected: pip install 'zsim[frames]'"
    )


def test_the_sentence_names_what_else_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"pip install 'zsim\[capture\]', or a preset$"):
        require("torch", "a module", "a preset")


def test_a_plain_install_runs_and_writes_its_report(tmp_path: Path) -> None:
    done = plain_zsim("run", "--model", "gpt2", "--nodes", "1", "--out", "out", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "plotly" in (tmp_path / "out" / "report.html").read_text("utf-8").lower()


def test_calibrate_without_scipy_is_one_paragraph_and_exit_code_2(tmp_path: Path) -> None:
    measured = ROOT / "traces" / "cpu-2core-epyc" / "microbench.json"
    done = plain_zsim("calibrate", str(measured), "--base", "cpu-gloo", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "zsim: zsim calibrate needs scipy, which is not installed; expected: pip install 'zsim[calibrate]'\n"
    )
