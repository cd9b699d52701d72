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
from zsim.ui.prediction import setting_token
from zsim.ui.words import run_safely

_MAX_ANSWERS = 3  # each with its figures


@dataclass(frozen=True)
class Answers:
    """The answer under way and the last ones done. A request for one that is under way waits for it."""

    simulate: Callable[[Mapping[str, Any], str], Answer]
    """Simulates a setting."""
    end: Callable[[], None]
    """Ends all that is under way for the setting before."""
    futures: dict[str, Future[Answer]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, field_values: Mapping[str, Any], other_settings: str) -> Answer:
        """The answer of a setting. Raises as `simulate` does."""
        token = setting_token(field_values, other_settings)
        with self.lock:
            future = self.futures.get(token)
            new_future: Future[Answer] | None = None
            if future is None:
                self.end()
                future = new_future = self.futures[token] = Future()
            while len(self.futures) > _MAX_ANSWERS:
                self.futures.pop(next(iter(self.futures)))
        if new_future is not None:
            try:
                new_future.set_result(self.simulate(field_values, other_settings))
            except BaseException as error:
                new_future.set_exception(error)
                with self.lock:
                    if self.futures.get(token) is new_future:
                        self.futures.pop(token)
        return future.result()

    def begin(self, initial: Mapping[str, Any]) -> None:
        """Simulate what the page starts with, concurrently."""
        threading.Thread(target=run_safely, args=(lambda: self.get(initial, ""),), daemon=True).start()
