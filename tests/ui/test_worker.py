"""The process beside the page ends with the page's server."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PAGE = """
import os, time
from zsim.ui.worker import Worker
print(Worker("nothing").result(os.getpid), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
def test_it_ends_when_the_server_is_killed() -> None:
    """It has the server's standard output, which ends when both have."""
    with subprocess.Popen([sys.executable, "-c", PAGE], stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        assert int(page.stdout.readline()) != page.pid
        page.kill()
        rest, _ = page.communicate(timeout=120)
    assert rest == ""
