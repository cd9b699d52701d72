"""Importing this hangs, in two processes; see test_launch.py."""

from __future__ import annotations

import os
import time
from pathlib import Path

child = os.fork()
(Path(os.environ["ZSIM_TEST_FOLDER"]) / f"pid-{1 if child else 0}").write_text(str(os.getpid()))
time.sleep(600)
