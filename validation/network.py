"""Simulated networks on one machine: private ones, and "nodes" joined by links of a chosen rate.

On one machine ranks communicate through the loopback, which is no network but CPU time. A private network
namespace has counters that no other process writes to. Ranks in separate namespaces, joined by a bridge, with
`tc tbf` limiting the rate of each, are nodes on slow links: the only setting on a CPU in which communication
can hide behind computation.

Namespaces are unnamed and nothing is left behind: the bridge lives in the launcher's private namespace, each
node's namespace in its rank, and both end with their processes. This needs root and kernel support; the
`why_not` functions return what is missing, and callers report that they skip.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

CLONE_NEWNET = 0x40000000
PRIVATE = ("unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
BRIDGE = "bridge0"


def _must(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


@functools.cache
def why_not_private() -> str | None:
    """None where a private network namespace can be made; else the reason why not."""
    missing = [command for command in ("unshare", "ip") if shutil.which(command) is None]
    if missing:
        return f"needs the command {missing[0]}"
    done = subprocess.run([*PRIVATE, "true"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no network namespaces here: {done.stderr.strip()}"


@functools.cache
def why_not_shaped() -> str | None:
    """None where nodes with shaped links can be made; else the reason why not."""
    if why_not_private():
        return why_not_private()
    missing = [command for command in ("tc", "nsenter") if shutil.which(command) is None]
    if missing:
        return f"needs the command {missing[0]}"
    probe = [*PRIVATE, sys.executable, "-m", "validation.network"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    return None if done.returncode == 0 else f"no shaped links here: {done.stderr.strip().splitlines()[-1]}"


def leave_network() -> None:
    """Move this process into a new, empty network namespace."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)")


def make_bridge() -> None:
    """Make a bridge in this process's (private) namespace."""
    _must("ip", "link", "add", BRIDGE, "type", "bridge")
    _must("ip", "link", "set", BRIDGE, "up")


def connect(pid: int, number: int, rate: str) -> None:
    """Give process `pid`, which is in its own empty network namespace, an `eth0` on the bridge, limited to
    `rate`.

    The limit of 8 MB matters: with less the shaper drops packets, and TCP stalls for 200 ms and more.
    """
    port, inside = f"port{number}", ("nsenter", "-t", str(pid), "-n")
    _must("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    _must("ip", "link", "set", port, "master", BRIDGE, "up")
    _must(*inside, "ip", "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
    _must(*inside, "ip", "link", "set", "eth0", "up")
    _must(*inside, "ip", "link", "set", "lo", "up")
    shaper = ("tbf", "rate", rate, "burst", "128kb", "limit", "8mb")
    _must(*inside, "tc", "qdisc", "add", "dev", "eth0", "root", *shaper)


def received_bytes(interface: str) -> int:
    """Bytes received by an interface of this process's namespace, from /proc/net/dev."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[0])
    raise ValueError(f"no interface '{interface}'")


def _probe() -> None:
    """Make one node and its link, to test whether that works here."""
    make_bridge()
    go, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        leave_network()
        os.write(done[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(done[0], 1)
    try:
        connect(pid, 0, "1gbit")
    finally:
        os.write(go[1], b"x")
        os.waitpid(pid, 0)


if __name__ == "__main__":
    _probe()
