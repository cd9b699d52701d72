"""The version of zsim."""

__version__ = "0.3.0"
