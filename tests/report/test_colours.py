"""Colours that stand beside each other are apart for colour-blind readers, and from both papers.

Colour blindness as Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color
Vision Deficiency" (IEEE TVCG 2009), table for severity 1.0, on linear RGB. Distances in OKLab (Björn
Ottosson, "A perceptual color space for image processing", 2020), times 100; about 2 is the least that is
seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest

from zsim.arrays import Floats
from zsim.goodput.views import COLORS
from zsim.report.critical.causes import CAUSES
from zsim.report.views.meanings import EVIDENCE, MEMORY, WHOLE_STEP, Meaning, text_on
from zsim.study.topologies.figures import PALETTE, SHADES

VISIONS: Mapping[str, list[list[float]]] = {
    "all three cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red cones (protanopia)": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998],
    ],
    "no green cones (deuteranopia)": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881],
    ],
    "no blue cones (tritanopia)": [
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900],
    ],
}  # fmt: skip
TO_CONES = np.array([
    [0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
])  # fmt: skip
TO_LAB = np.array([
    [0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
])  # fmt: skip


def colours(meanings: Mapping[str, Meaning]) -> dict[str, str]:
    return {name: meaning.color for name, meaning in meanings.items()}


# The least distance of two colours of each palette; a path's causes have their names in a table as well.
PALETTES: Mapping[str, tuple[float, Mapping[str, str]]] = {
    "parts of a step": (7.5, colours(WHOLE_STEP)),
    "memory": (7.5, colours(MEMORY)),
    "a whole run": (8, COLORS),
    "evidence": (7.5, colours(EVIDENCE)),
    "clusters and tiers": (8, {colour: colour for colour in PALETTE}),
    "causes": (5, colours(CAUSES)),
}


def linear(colour: str) -> Floats:
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    found: Floats = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return found


def seen(colour: str, vision: str) -> Floats:
    """Lightness and two hues, as an eye with `vision` sees a colour."""
    found: Floats = (
        TO_LAB @ np.cbrt(TO_CONES @ np.clip(np.array(VISIONS[vision]) @ linear(colour), 0, 1)) * 100
    )
    return found


def contrast(colour: str, other: str) -> float:
    """WCAG's ratio of luminances."""
    both = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(one)) + 0.05 for one in (colour, other))
    return both[1] / both[0]


def test_the_simulation_leaves_grey_grey_and_confuses_what_the_blind_confuse() -> None:
    """Okabe and Ito's vermilion and bluish green are apart for all; a pure red and a green of its lightness
    are not for a deuteranope."""
    for vision in VISIONS:
        assert np.abs(seen("#8A8A8A", vision)[1:]).max() < 0.1
        assert np.linalg.norm(seen("#D55E00", vision) - seen("#009E73", vision)) > 8
    red, green = "#FF0000", "#9A9100"
    assert np.linalg.norm(seen(red, "all three cones") - seen(green, "all three cones")) > 25
    blind = "no green cones (deuteranopia)"
    assert np.linalg.norm(seen(red, blind) - seen(green, blind)) < 4


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("palette", PALETTES)
def test_every_two_colours_of_a_palette_are_apart(palette: str, vision: str) -> None:
    least, palette_colours = PALETTES[palette]
    near = {
        (one, other): round(float(distance), 1)
        for one, other in itertools.combinations(palette_colours, 2)
        if (
            distance := np.linalg.norm(
                seen(palette_colours[one], vision) - seen(palette_colours[other], vision)
            )
        )
        < least
    }
    assert near == {}


@pytest.mark.parametrize("vision", VISIONS)
def test_a_busier_link_is_darker_for_every_eye(vision: str) -> None:
    lightness = [seen(shade, vision)[0] for shade in SHADES[1:]]
    assert all(before - after > 3 for before, after in itertools.pairwise(lightness))


@pytest.mark.parametrize("palette", PALETTES)
def test_no_colour_is_lost_on_white_or_near_black(palette: str) -> None:
    """Cards are #ffffff, or #1b212a in the dark."""
    for colour in PALETTES[palette][1].values():
        assert contrast(colour, "#FFFFFF") > 1.25, colour
        assert contrast(colour, "#1B212A") > 1.9, colour


@pytest.mark.parametrize("palette", PALETTES)
def test_numbers_on_a_bar_can_be_read(palette: str) -> None:
    """WCAG asks 4.5 of text; near-black on a middle grey is the least that any colour leaves."""
    for colour in PALETTES[palette][1].values():
        assert contrast(colour, text_on(colour)) > 3.8, colour
