"""The page in headless Chromium: settings are turned as a person would, words and figures follow."""

from __future__ import annotations

import json
import re
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.browser import chromium, in_browser, listen
from tests.ui.test_form import made
from zsim.specs.experiment.load import change_experiment
from zsim.ui import app as serve
from zsim.ui.app import make_app

SOON = 120_000  # milliseconds that a busy machine may take
LENGTHS = """name => (document.querySelector(`#plot-${name} .js-plotly-plot`)?.calcdata ?? [])
    .map(trace => trace.map(point => point.s ?? point.x))"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve.open_socket("127.0.0.1", 0) as place:
        app = make_app(change_experiment(made(), {"model.n_layer": 2}), tmp_path_factory.mktemp("ui"))
        server = serve.make_server(app, place, "127.0.0.1")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield serve.address("127.0.0.1", place.getsockname()[1])
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests, since it takes its time to start."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(address: str, browser: Any) -> Iterator[Any]:
    """A page of the test's own, which begins with the experiment. It must have said nothing to the console
    and asked nobody else for anything."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(SOON)
    said, asked = listen(page)
    page.goto(address)
    page.wait_for_selector("#plot-timeline .bars path", state="attached")
    yield page
    page.close()
    assert said == []
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []


def set_number(page: Any, key: str, value: object) -> None:
    page.fill(f"#field-{key}", str(value))
    page.press(f"#field-{key}", "Enter")


def choose(page: Any, key: str, name: str) -> None:
    page.click(f"#field-{key}")
    page.click(f".dash-dropdown-content label:has-text('{name}')")


def title_with(page: Any, text: str) -> None:
    page.wait_for_selector(f"#answer h1:has-text('{text}')")


def until(page: Any, is_so: Callable[[], bool]) -> None:
    """The page's own policy forbids the strings that `wait_for_function` would run in it."""
    for _ in range(SOON // 50):
        if is_so():
            return
        page.wait_for_timeout(50)
    pytest.fail("it never came")


def lengths(page: Any, plot: str) -> Any:
    """The lengths that a figure draws, trace by trace."""
    return page.evaluate(LENGTHS, plot)


def end_of_timeline(page: Any) -> Any:
    return page.evaluate(
        "() => document.querySelector('#plot-timeline .js-plotly-plot').layout.xaxis.range[1]"
    )


def taken(page: Any, name: str) -> str:
    """The text of a file that the page offers."""
    with page.expect_download() as waiting:
        page.click(f"#files button:text-is('{name}')")
    assert waiting.value.suggested_filename == name
    return Path(waiting.value.path()).read_text()


@in_browser
def test_the_experiment_stands_there_at_first(page: Any) -> None:
    title_with(page, "gpt2 | ZeRO-3 | dgx-h100 | 16 GPUs")
    verdict = page.text_content("#answer .verdict")
    assert verdict.startswith("Fits ")
    assert re.search(
        r"; torch allocates .* GB and reserves .* GB\. Probability that it fits 99 %\.$", verdict
    )
    assert [tile.text_content() for tile in page.query_selector_all(".tile .label")][:3] == [
        "Step time", "Tokens/s/GPU", "MFU",
    ]  # fmt: skip
    assert page.is_visible("#card-gpu")
    assert not page.is_visible("#card-nvme")
    assert page.get_attribute("#field-gpus", "placeholder") == "16"


@in_browser
def test_a_setting_turned_changes_words_figures_and_the_curve(page: Any) -> None:
    """8 x 512 tokens. The curve has 16 GPUs halved and doubled three times: 2 to 128, in all that it draws,
    whose first is the band of what a measured run may be, there and back."""
    title_with(page, "16 GPUs")
    utilisation, step = page.locator(".tile .number").nth(2).text_content(), lengths(page, "step")
    set_number(page, "training-micro_batch_size", 8)
    page.wait_for_selector(".tile .small:has-text('4,096 tokens per GPU')")
    until(page, lambda: page.locator(".tile .number").nth(2).text_content() != utilisation)
    until(page, lambda: "times as many tokens per second as before" in page.text_content("#change"))
    until(page, lambda: lengths(page, "step") != step)
    counts = [2, 4, 8, 16, 32, 64, 128]
    until(page, lambda: lengths(page, "throughput") == [counts + counts[::-1], counts, counts])
    until(page, lambda: "GPUs" in page.text_content("#curve-words"))
    set_number(page, "training-micro_batch_size", "")
    page.wait_for_selector(".tile .small:has-text('512 tokens per GPU')")


@in_browser
def test_a_number_counts_at_enter_and_a_moment_after_the_last_key(page: Any) -> None:
    page.fill("#field-training-micro_batch_size", "3")
    page.wait_for_selector(".tile .small:has-text('1,536 tokens per GPU')")
    set_number(page, "training-micro_batch_size", "")
    page.wait_for_selector(".tile .small:has-text('512 tokens per GPU')")


@in_browser
def test_an_impossible_setting_is_zsims_own_sentence_and_the_last_answer_stays(page: Any) -> None:
    set_number(page, "training-sequence_length", 8192)
    page.wait_for_selector("#error:has-text('found 8192')")
    said = "training.sequence_length: found 8192, but 'gpt2' has 1024 learned positions"
    assert page.text_content("#error") == said
    assert page.get_attribute("#results", "class") == "stale"
    assert "16 GPUs" in page.text_content("#answer h1")
    set_number(page, "training-sequence_length", 512)
    page.wait_for_selector("#error", state="hidden")
    assert page.get_attribute("#results", "class") == ""


@in_browser
def test_a_misspelt_key_is_met_with_the_nearest_right_one(page: Any) -> None:
    page.fill("#more", "training.sequense_length = 4")
    page.click("#apply")
    page.wait_for_selector("#error:has-text(\"did you mean 'sequence_length'?\")")
    page.fill("#more", "")
    page.click("#apply")
    page.wait_for_selector("#error", state="hidden")


@in_browser
def test_what_does_not_fit_says_which_tier_and_by_how_much(page: Any) -> None:
    """4,096 sequences on a GPU: their logits alone are 4096 x 512 x 50257 x 4 bytes, 421 GB."""
    set_number(page, "training-micro_batch_size", 4096)
    page.wait_for_selector("#answer .verdict.broken")
    assert page.text_content("#answer .verdict").startswith("Does not fit GPU memory: ")
    assert page.text_content(".tier.broken .n").endswith(" too much")
    page.click(".mends button")
    page.wait_for_selector("#answer .verdict.fits")
    set_number(page, "training-gradient_accumulation_steps", 1)
    set_number(page, "training-micro_batch_size", "")
    page.wait_for_selector("#answer .verdict.fits")


@in_browser
def test_offloading_shows_its_tiers_and_another_framework_its_own_fields(page: Any) -> None:
    choose(page, "offload_optimizer", "NVMe")
    page.wait_for_selector("#card-nvme", state="visible")
    assert page.locator(".tier").count() == 3
    choose(page, "offload_optimizer", "no")
    page.wait_for_selector("#card-nvme", state="hidden")
    choose(page, "strategy-kind", "FSDP2")
    title_with(page, "FSDP2")
    assert page.is_visible("#row-strategy-replicate")
    assert not page.is_visible("#row-strategy-stage")
    set_number(page, "strategy-replicate", 2)
    title_with(page, "HSDP 2 x 8")
    set_number(page, "strategy-replicate", "")
    choose(page, "strategy-kind", "DeepSpeed ZeRO")
    title_with(page, "ZeRO-3")


@in_browser
def test_typing_in_a_list_searches_it_and_a_rank_opens_the_adapters(page: Any) -> None:
    """By keyboard alone: the first key press in a list that the Tab key reached opens and searches it."""
    assert not page.is_visible("#row-training-lora-targets")
    page.focus("#row-training-precision .dash-dropdown-focus-target")
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.type("f")
    page.wait_for_selector(".dash-dropdown-search:focus")  # until then Dash drops what is typed
    page.keyboard.type("p1")
    page.wait_for_selector(".dash-dropdown-option:has-text('fp16')")
    assert page.locator(".dash-dropdown-option").count() == 1
    page.keyboard.press("Escape")
    set_number(page, "training-lora-rank", 8)
    page.wait_for_selector("#row-training-lora-targets", state="visible")
    assert "adapters" in page.get_attribute("#row-training-lora-rank", "title")
    set_number(page, "training-lora-rank", "")
    page.wait_for_selector("#row-training-lora-targets", state="hidden")


@in_browser
def test_files_of_what_is_shown_can_be_taken_along(page: Any) -> None:
    choose(page, "strategy-stage", "2: gradients too")
    title_with(page, "ZeRO-2")
    assert json.loads(taken(page, "ds_config.json"))["zero_optimization"]["stage"] == 2
    assert tomllib.loads(taken(page, "experiment.toml"))["nodes"] == 2
    assert "machine_rank: 0" in taken(page, "accelerate.yaml")
    assert "ZeRO-2" in taken(page, "report.html")
    assert "ZeRO-2" in taken(page, "film.html")
    choose(page, "strategy-stage", "3: parameters too")
    title_with(page, "ZeRO-3")


@in_browser
def test_a_view_zooms_the_timeline(page: Any) -> None:
    page.wait_for_selector("#plot-timeline .bars path", state="attached")  # the first may have no width
    whole = end_of_timeline(page)
    page.click("#views button:has-text('start')")
    until(page, lambda: end_of_timeline(page) < whole / 10)
    page.click("#views button:has-text('whole step')")
    until(page, lambda: end_of_timeline(page) == whole)


@in_browser
def test_settings_are_in_the_address_and_stand_side_by_side(page: Any, address: str) -> None:
    """Pinned, turned, and opened again at the same address: the same two columns, the difference marked."""
    title_with(page, "16 GPUs")
    page.click("#pin")
    set_number(page, "training-micro_batch_size", 2)
    page.wait_for_selector(".sided mark:has-text('2')")
    until(page, lambda: "training.micro_batch_size=2" in page.url and "pin=" in page.url)
    other = page.context.browser.new_page(viewport={"width": 1280, "height": 900})
    other.set_default_timeout(SOON)
    said, _ = listen(other)
    other.goto(page.url)
    other.wait_for_selector(".sided mark:has-text('2')")
    assert other.input_value("#field-training-micro_batch_size") == "2"
    assert [one.text_content() for one in other.query_selector_all(".sided .letter")] == ["A", "Now"]
    assert other.locator(".sided .interval").count() in (0, 2)
    assert said == []
    other.close()
    page.click("button[aria-label='Remove A']")
    page.wait_for_selector("#card-sided", state="hidden")
    set_number(page, "training-micro_batch_size", "")
    until(page, lambda: "micro_batch_size" not in page.url and "pin" not in page.url)


@in_browser
def test_other_settings_of_an_address_wait_for_a_click(browser: Any, address: str) -> None:
    """Anybody may link here. The fields of the address count at once, 2 x 512 tokens; what is written freely,
    of a pinned setting too, stands there and is not asked for before Apply."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(SOON)
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.post_data or ""))
    pin = quote("more=" + quote("training.sekvens = 5"))
    page.goto(f"{address}#training.micro_batch_size=2&more={quote('training.sequense_length = 4')}&pin={pin}")
    page.wait_for_selector(".tile .small:has-text('1,024 tokens per GPU')")
    page.wait_for_selector("#held-words", state="visible")
    assert page.input_value("#more") == "training.sequense_length = 4\ntraining.sekvens = 5"
    assert page.text_content("#error") == ""
    assert not page.is_visible("#card-sided")
    assert not any("sekvens" in one for one in sent)
    page.click("#apply")
    page.wait_for_selector("#error:has-text(\"did you mean 'sequence_length'?\")")
    page.wait_for_selector("#held-words", state="hidden")
    page.close()


@in_browser
def test_an_unknown_model_of_an_address_is_met_with_the_nearest(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.set_default_timeout(SOON)
    page.goto(f"{address}#model=llama-3-8bb")
    page.wait_for_selector("#error:has-text(\"model: unknown 'llama-3-8bb'; did you mean 'llama-3-8b'?\")")
    page.close()


@in_browser
def test_the_step_is_a_film_over_the_cluster(page: Any) -> None:
    """A later frame moves lines to other shades, the mark over the loads, and the words; Play goes on by
    itself."""
    page.wait_for_selector("#plot-cluster .js-plotly-plot .scatterlayer path", state="attached")
    mark = "() => document.querySelector('#plot-loads .js-plotly-plot').layout.shapes[0].x0"
    until(page, lambda: "in use" in page.text_content("#film-words"))
    before, first = page.evaluate(mark), page.text_content("#film-words")
    page.focus("#frame")
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    until(page, lambda: page.evaluate(mark) > before)
    until(page, lambda: page.text_content("#film-words") != first)
    assert "nvlink" in page.text_content("#film-words")
    at = page.evaluate(mark)
    page.click("#play")
    until(page, lambda: page.evaluate(mark) > at)
    page.click("#play")
    assert page.text_content("#play") == "Play"


@in_browser
def test_a_whole_run_is_simulated_on_the_page(page: Any) -> None:
    """A billion tokens: days, goodput and failures; without tokens there is no run, and its fields are
    hidden."""
    assert page.is_disabled("#go")
    assert not page.is_visible("#row-run-recovery-spares")
    set_number(page, "run-tokens", 1)
    page.wait_for_selector("#row-run-recovery-spares", state="visible")
    until(page, lambda: page.is_enabled("#go"))
    page.click("#go")
    page.wait_for_selector("#run-words .tile")
    labels = [one.text_content() for one in page.query_selector_all("#run-words .tile .label")]
    assert labels[:3] == ["Days", "Goodput", "Failures"]
    page.wait_for_selector("#box-run-waterfall", state="visible")
    set_number(page, "run-tokens", "")
    page.wait_for_selector("#run-words:has-text('Fill in the tokens')")
    page.wait_for_selector("#box-run-waterfall", state="hidden")


@in_browser
def test_a_training_file_and_a_recorded_trace_are_uploaded(page: Any, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}))
    page.set_input_files("#upload input", path)
    title_with(page, "ZeRO-1")
    assert page.input_value("#field-training-micro_batch_size") == "2"
    trace = Path(__file__).parents[2] / "traces/gloo/ddp-even-2ranks/rank0.kineto.json.gz"
    page.set_input_files("#upload input", trace)
    page.wait_for_selector("#card-recorded", state="visible")
    assert "on 2 ranks" in page.text_content("#recorded-words")
    until(page, lambda: "recording=" in page.url)
    set_number(page, "nodes", 1)
    page.wait_for_selector("#recorded-words:has-text('job has 8 ranks')")
    other = page.context.browser.new_page()
    other.goto(page.url)
    other.wait_for_selector("#recorded-words:has-text('on 2 ranks')", timeout=SOON)
    other.goto("about:blank")
    other.goto(page.url.partition("recording=")[0] + "recording=0000000000000000/mine.json")
    other.wait_for_selector("#recorded-words:has-text('mine.json stood here')", timeout=SOON)
    other.close()
    page.click("#forget")
    page.wait_for_selector("#card-recorded", state="hidden")
    until(page, lambda: "recording=" not in page.url)
    set_number(page, "nodes", 2)
    choose(page, "strategy-stage", "3: parameters too")
    set_number(page, "training-micro_batch_size", "")
    page.fill("#more", "")
    page.click("#apply")
    title_with(page, "ZeRO-3")


@in_browser
def test_the_keyboard_skips_to_the_results_and_landmarks_have_names(page: Any) -> None:
    page.evaluate("() => document.activeElement.blur()")
    page.focus("#skip")
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.id") == "main"
    assert page.get_attribute("#settings", "aria-label") == "Settings"
    assert page.get_attribute("#answer", "aria-live") == "polite"
    names = """() => [...document.querySelectorAll("button, input, textarea")]
        .filter((box) => box.checkVisibility() && !box.closest("label, .modebar")
            && !(box.textContent || box.getAttribute("aria-label") || box.title))
        .map((box) => box.outerHTML)"""
    assert page.evaluate(names) == []


@in_browser
def test_on_a_phone_nothing_is_wider_than_the_screen(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    until(page, lambda: page.evaluate("() => document.documentElement.scrollWidth") <= 390)
    page.set_viewport_size({"width": 1280, "height": 900})
