"""Errors as the page shows them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from zsim.errors import ZsimError

_TOO_LARGE = (MemoryError, OverflowError, RecursionError)


def said(work: Callable[[], Any]) -> tuple[Any, str]:
    """(the result of `work`, or None; the message for the user if it failed). The page never shows a
    traceback; that of a bug in zsim goes to the terminal."""
    try:
        return work(), ""
    except ZsimError as error:
        return None, str(error)
    except _TOO_LARGE as error:
        return None, f"the numbers are larger than zsim can hold ({type(error).__name__})"
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return None, f"zsim made a mistake here ({type(error).__name__}); the terminal has the details"
