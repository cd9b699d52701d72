"""The film of a step as a page of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import check_file, chromium, in_browser
from tests.ui.test_form import made
from zsim.engine.micro_batches import simulate_step
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.study.topologies.figures import NUM_FRAMES, animate_step
from zsim.study.topologies.result import animation_page


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    step = simulate_step(resolve(change_experiment(made(), {"model.n_layer": 2, "nodes": 4})))
    path = tmp_path_factory.mktemp("film") / "film.html"
    path.write_text(animation_page(animate_step(step.outcome), "gpt2 <b>"), encoding="utf-8")
    return path


def test_it_holds_all_frames_and_no_markup_of_a_name(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert f'max="{NUM_FRAMES - 1}"' in text
    assert "gpt2 &lt;b&gt;" in text
    assert "gpt2 <b>" not in text


@in_browser
def test_it_fetches_nothing_and_fits_a_phone(path: Path) -> None:
    with chromium() as browser:
        check_file(browser, path, ["cluster", "loads"])
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.goto(path.as_uri())
        page.wait_for_selector('html[data-drawn="2"]', state="attached")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390


@in_browser
def test_arrows_and_play_move_the_links_the_mark_and_the_words(path: Path) -> None:
    mark = "() => document.querySelector('#plot-loads').layout.shapes[0].x0"
    with chromium() as browser:
        page = browser.new_page()
        page.goto(path.as_uri())
        page.wait_for_selector('html[data-drawn="2"]', state="attached")
        words, at = page.text_content("#film-words"), page.evaluate(mark)
        page.focus("#frame")
        for _ in range(5):
            page.keyboard.press("ArrowRight")
        assert page.evaluate(mark) > at
        assert page.text_content("#film-words") != words
        page.click("#play")
        page.wait_for_selector("#play:text-is('Stop')")
        before = page.evaluate(mark)
        page.wait_for_timeout(1000)
        page.click("#play")
        assert page.evaluate(mark) > before
