"""The names of the Python face: all are there, and none is loaded before it is used."""

from __future__ import annotations

import pytest

import zsim


@pytest.mark.parametrize("name", zsim.__all__)
def test_every_public_name_can_be_loaded(name: str) -> None:
    assert getattr(zsim, name) is not None
