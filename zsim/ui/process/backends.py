"""The page's processes: one that answers, one that searches remedies, one for the curve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zsim.ui.form import Form
from zsim.ui.process.worker import Worker

_MAX_SECONDS_ASIDE = 600.0  # of what the page does not wait for
_NICENESS_OF_CURVE = 10  # it is asked for by nobody, and leaves processor time to who turns settings


class Backends:
    """A backend in each of three processes, for one form. `make` makes a backend there."""

    def __init__(self, form: Form, make: Callable[[], Any]) -> None:
        self.form = form
        self.answer_worker = Worker("the answer", make)
        self.remedy_worker = Worker("what would fit", make, max_seconds=_MAX_SECONDS_ASIDE)
        self.curve_worker = Worker(
            "the curve", make, niceness=_NICENESS_OF_CURVE, max_seconds=_MAX_SECONDS_ASIDE
        )

    def end(self) -> None:
        """End all that is under way: the page shows another setting."""
        for worker in (self.answer_worker, self.remedy_worker, self.curve_worker):
            worker.end()
