"""The page's processes: one that answers, one that looks for remedies, one for the curve."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zsim.ui.form import Form
from zsim.ui.worker import Worker

if TYPE_CHECKING:
    from zsim.ui.desk import Desk

_MAX_SECONDS_ASIDE = 600.0  # of what the page does not wait for
_NICENESS_OF_CURVE = 10  # it is asked for by nobody, and leaves processor time to who turns settings


class Desks:
    """A desk in each of three processes, for one form. `folder` is the page's own."""

    def __init__(self, form: Form, folder: Path) -> None:
        from zsim.ui.desk import Desk

        make = partial(Desk, form, folder)
        self.form, self.desk = form, Desk
        self.answers: Worker[Desk] = Worker("the answer", make)
        self.remedies: Worker[Desk] = Worker("what would fit", make, max_seconds=_MAX_SECONDS_ASIDE)
        self.curve: Worker[Desk] = Worker(
            "the curve", make, niceness=_NICENESS_OF_CURVE, max_seconds=_MAX_SECONDS_ASIDE
        )

    def end(self) -> None:
        """End all that is under way: the page shows another setting."""
        for worker in (self.answers, self.remedies, self.curve):
            worker.end()
