"""Packages that one part of zsim needs and that a plain install leaves out."""

from __future__ import annotations

import importlib.util

from zsim.errors import InputError

# Package -> the extra of pyproject.toml that brings it. pandas and scipy are half the size of all packages
# that zsim can use, and a simulation with its report needs neither.
EXTRA_OF = {
    "dash": "ui",
    "distributed": "dask",
    "pandas": "frames",
    "pyarrow": "parquet",
    "scipy": "calibrate",
    "torch": "capture",
}


def require(package: str, feature: str, otherwise: str = "") -> None:
    """Raise InputError where `package` is not installed, saying what to install for it.

    `feature` names what needs it, and `otherwise` what else would do.
    """
    if importlib.util.find_spec(package) is None:
        alternative = f", or {otherwise}" if otherwise else ""
        raise InputError(
            f"{feature} needs {package}, which is not installed; "
            f"expected: pip install 'zsim[{EXTRA_OF[package]}]'{alternative}"
        )
