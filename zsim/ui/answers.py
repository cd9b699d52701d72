"""The last answers, by setting. What is shown again is not simulated again, and the first is simulated while
the browser still starts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import field
from typing import Any

from zsim.dataclass import dataclass
from zsim.ui.answer import Answer
from zsim.ui.prediction import token_of
from zsim.ui.words import said

_MAX_KEPT = 3  # each with its figures


@dataclass(frozen=True)
class Answers:
    """The answer under way and the last ones done. A request for one that is under way waits for it."""

    work: Callable[[Mapping[str, Any], str], Answer]
    """Simulates a setting."""
    end: Callable[[], None]
    """Ends all that is under way for the setting before."""
    kept: dict[str, Future[Answer]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, shown: Mapping[str, Any], more: str) -> Answer:
        """The answer of a setting. Raises as `simulate` does."""
        token = token_of(shown, more)
        with self.lock:
            found = self.kept.get(token)
            own: Future[Answer] | None = None
            if found is None:
                self.end()
                found = own = self.kept[token] = Future()
            while len(self.kept) > _MAX_KEPT:
                self.kept.pop(next(iter(self.kept)))
        if own is not None:
            try:
                own.set_result(self.work(shown, more))
            except BaseException as error:
                own.set_exception(error)
                with self.lock:
                    if self.kept.get(token) is own:
                        self.kept.pop(token)
        return found.result()

    def begin(self, initial: Mapping[str, Any]) -> None:
        """Simulate what the page starts with, concurrently."""
        threading.Thread(target=said, args=(lambda: self.of(initial, ""),), daemon=True).start()
