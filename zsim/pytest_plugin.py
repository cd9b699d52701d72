"""zsim in pytest: compare traces, and hold predictions to a baseline, as tests.

    def test_the_plan_is_what_we_recorded(zsim_check):
        zsim_check("jobs/llama.toml", "recorded/llama.json.gz")

    @pytest.mark.zsim(step=0.03, memory=0.01)
    def test_the_job_costs_what_it_did(zsim_check):
        zsim_check("jobs/llama.toml")                # against the baseline

Paths are relative to the test's folder. The baseline is `zsim-baseline.json` next to pytest's ini file, or
the file of the ini option `zsim_baseline`. `pytest --zsim-update-baseline` writes it. A table of measured
runs (.csv) is checked row by row, with the baseline's tolerances. A comparison that is inconclusive skips its
test: it has neither failed nor passed.

Nothing heavy is imported before a test asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from zsim.comparison.comparison import Comparison
    from zsim.comparison.verdict import Tolerances
    from zsim.study.check.baseline import Baseline, CheckRow
    from zsim.trace.trace import Trace

_MARKER = (
    "zsim(rel=None, step=None, time=None, memory=None, overlap=None): tolerances of zsim_check in this test, "
    "as fractions; rel is for all of them"
)
_NAMES = ("step", "time", "memory", "overlap")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("zsim")
    group.addoption(
        "--zsim-update-baseline", action="store_true", help="pin what zsim_check finds now into the baseline"
    )
    parser.addini("zsim_baseline", "the baseline file of zsim_check", default="zsim-baseline.json")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def zsim_trace(request: pytest.FixtureRequest) -> Callable[[Any], Trace]:
    """A function that gives the trace of a trace file, an experiment (file, object or mapping) or a
    result."""
    return lambda source: _trace(source, request.path.parent)


@pytest.fixture
def zsim_check(request: pytest.FixtureRequest) -> ZsimCheck:
    """A function that compares two traces, or checks one trace against the baseline."""
    return ZsimCheck(request)


class ZsimCheck:
    """`check(simulated, recorded)` compares, and `check(simulated)` checks against the baseline, under its
    path or `name`.

    Either fails the test with the differences, most important first.
    """

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self._folder = request.path.parent

    def __call__(
        self, simulated: Any, recorded: Any = None, *, name: str | None = None, **tolerances: float
    ) -> Comparison | None:
        from zsim.errors import ZsimError

        tolerances_given = {**self._marked_tolerances(), **tolerances}
        comparison, error_text = None, ""
        try:
            comparison = self._check_or_compare(simulated, recorded, name, tolerances_given)
        except ZsimError as error:  # a missing file, a wrong key: the message suffices
            error_text = str(error)
        if error_text:
            _fail(error_text)
        if comparison is None:
            return None
        if comparison.verdict == "fail":
            pytest.fail(str(comparison), pytrace=False)
        if comparison.verdict == "inconclusive":
            pytest.skip(f"inconclusive: {comparison.doubt}")
        return comparison

    def _check_or_compare(
        self, simulated: Any, recorded: Any, name: str | None, tolerances: Mapping[str, float]
    ) -> Comparison | None:
        if recorded is None and isinstance(simulated, str | Path) and Path(simulated).suffix == ".csv":
            self._check_table(self._folder / simulated)
            return None
        trace = _trace(simulated, self._folder)
        if recorded is None:
            self._check_pinned(trace, name or self._name(simulated), tolerances)
            return None
        from zsim.comparison.compare import compare

        names = (_source_name(simulated, "simulated"), _source_name(recorded, "recorded"))
        return compare(
            trace, _trace(recorded, self._folder), tolerances=_tolerances(tolerances, None), names=names
        )

    def _check_pinned(self, trace: Trace, name: str, requested: Mapping[str, float]) -> None:
        from zsim.study.check.baseline import pinned_content, pinned_rows

        baseline = self._baseline(name, lambda baseline: baseline.pin(name, pinned_content(trace)))
        if baseline is None:
            return
        tolerances = _tolerances(requested, baseline.tolerances_of(name))
        rows = list(pinned_rows(name, trace, baseline.cases[name], tolerances, baseline.path.name))
        excused_rows = [row for row in rows if baseline.reason_of(name, row.name)]
        _judge(name, baseline, [row for row in rows if row not in excused_rows])

    def _check_table(self, path: Path) -> None:
        """Check measured rows, as `zsim check --baseline` does, under the table's path."""
        from zsim.study.check.check import run_check
        from zsim.study.check.targets import find_targets
        from zsim.study.measured.experiment_table import read_experiment_runs

        root = self._request.config.rootpath
        for target in find_targets([path], root).targets:
            if target.kind == "runs":
                read_experiment_runs(path)  # its errors are reported before missing cases of the baseline
            baseline = self._baseline(
                target.name,
                lambda loaded_baseline: run_check([path], root, baseline=loaded_baseline, update=True),
            )
            if baseline is not None:
                _judge(target.name, baseline, run_check([path], root, baseline=baseline).rows)

    def _baseline(self, name: str, pin: Callable[[Baseline], object]) -> Baseline | None:
        """The baseline, which has `name`. None if that was just pinned."""
        from zsim.study.check.baseline import Baseline, read_baseline

        config = self._request.config
        path = Path(config.inipath.parent if config.inipath else config.rootpath) / str(
            config.getini("zsim_baseline")
        )
        if config.getoption("--zsim-update-baseline"):
            if hasattr(config, "workerinput"):
                raise pytest.UsageError("--zsim-update-baseline: workers would overwrite each other's pins")
            baseline = read_baseline(path) if path.exists() else Baseline(path)
            pin(baseline)
            baseline.write()
            return None
        if not path.exists():
            _fail(f"{path}: no baseline yet; pytest --zsim-update-baseline writes it")
        baseline = read_baseline(path)
        if name not in baseline.cases:
            _fail(f"{name} is not in {path.name}; pytest --zsim-update-baseline adds it")
        return baseline

    def _marked_tolerances(self) -> dict[str, float]:
        """The tolerances of the test's markers. Nearer markers take precedence."""
        tolerances: dict[str, float] = {}
        for marker in reversed(list(self._request.node.iter_markers("zsim"))):
            unknown = sorted(set(marker.kwargs) - {*_NAMES, "rel"})
            if marker.args or unknown:
                invalid_name = unknown[0] if unknown else repr(marker.args[0])
                raise pytest.UsageError(
                    f"marker zsim: found {invalid_name}, expected {', '.join(('rel', *_NAMES))}"
                )
            if "rel" in marker.kwargs:
                tolerances |= dict.fromkeys(_NAMES, marker.kwargs["rel"])
            tolerances |= {key: value for key, value in marker.kwargs.items() if key != "rel"}
        return tolerances

    def _name(self, source: Any) -> str:
        """A case's name: its path relative to the root, else the test's id."""
        if isinstance(source, str | Path):
            path = (self._folder / source).resolve()
            root = self._request.config.rootpath.resolve()
            return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        return str(self._request.node.nodeid)


def _judge(name: str, baseline: Baseline, rows: Sequence[CheckRow]) -> None:
    """Fail the test with the rows that moved, skip it for inconclusive rows."""
    failed_rows = [row.line for row in rows if row.outcome == "fail"]
    if failed_rows:
        _fail("\n".join([f"{name} is not what {baseline.path.name} pins:", *failed_rows]))
    doubtful = [row.sentence for row in rows if row.outcome == "inconclusive"]
    if doubtful:
        pytest.skip(f"inconclusive: {doubtful[0]}")


def _fail(message: str) -> NoReturn:
    pytest.fail(message, pytrace=False)


def _trace(source: Any, folder: Path) -> Trace:
    """The trace of a path, an experiment, a result or a trace."""
    if isinstance(source, str | Path):
        from zsim.study.check.targets import load_trace

        return load_trace(folder / source)
    if hasattr(source, "trace"):
        trace: Trace = source.trace
        return trace
    if hasattr(source, "info_indices"):
        source_trace: Trace = source
        return source_trace
    import zsim
    from zsim.api import simulate

    experiment = zsim.Experiment.of_data(source) if isinstance(source, Mapping) else source
    if not isinstance(experiment, zsim.Experiment):
        raise TypeError(f"found {type(source).__name__}, expected a path, an experiment, a result or a trace")
    return simulate(experiment).trace


def _source_name(source: Any, otherwise: str) -> str:
    return str(source) if isinstance(source, str | Path) else otherwise


def _tolerances(overrides: Mapping[str, float], base: Tolerances | None) -> Tolerances:
    from zsim.comparison.verdict import Tolerances

    base = base or Tolerances()
    return Tolerances.of({name: getattr(base, name) for name in _NAMES} | dict(overrides))
