"""Fabrics as they are drawn: what is folded, and that no link is lost by folding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.browser import check_file, chromium, in_browser
from tests.ui.test_form import made
from zsim.engine.micro_batches import simulate_step
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.topology.topology import Topology
from zsim.study.topologies.drawing import Drawing, draw_fabric
from zsim.study.topologies.figures import NUM_FRAMES, animate_step
from zsim.study.topologies.result import animation_page


def drawn(name: str, nodes: int) -> Drawing:
    cluster = load_cluster(name)
    return draw_fabric(Topology(cluster, nodes, cluster.gpus_per_node))


def test_pods_of_a_rail_optimised_tree_are_folded() -> None:
    """128 nodes, 32 to a pod: each pod's nodes in boxes of 8, its 8 leaves one circle, 16 spines another."""
    found = {box.name: box.devices for box in drawn("dgx-superpod-h100", 128).boxes}
    nodes = {name: count for name, count in found.items() if name.startswith("nodes")}
    assert list(nodes)[:2] == ["nodes 0-7", "nodes 8-15"]
    assert list(nodes.values()) == [8] * 16
    assert [count for name, count in found.items() if " x leaf" in name] == [8] * 4
    assert [count for name, count in found.items() if " x spine" in name] == [16]


def test_many_pods_share_boxes_and_few_nodes_are_not_folded() -> None:
    """1,024 nodes are 32 pods, two to a box; 24 nodes are 24 boxes."""
    boxes = [box for box in drawn("dgx-superpod-h100-3-level", 1024).boxes if box.is_nodes]
    assert [box.devices for box in boxes] == [64] * 16
    assert sum(box.is_nodes for box in drawn("dgx-h100", 24).boxes) == 24
    assert not drawn("dgx-h100", 24).is_folded
    assert drawn("dgx-h100", 25).is_folded


@pytest.mark.parametrize(
    ("name", "nodes"), [("dgx-h100", 100), ("dgx-superpod-h100", 128), ("gb200-nvl72", 72), ("aws-p5", 64)]
)
def test_folding_loses_no_link_of_the_network_and_none_inside_nodes(name: str, nodes: int) -> None:
    """Every link between different boxes is on one line, every link inside nodes in one box."""
    cluster = load_cluster(name)
    topology = Topology(cluster, nodes, cluster.gpus_per_node)
    found = draw_fabric(topology)
    first = topology.classes["nic_out"].first
    on_lines = np.concatenate([line.links for line in found.lines])
    inside = np.concatenate([own for box in found.boxes for own in box.links.values()])
    assert len(set(on_lines.tolist())) == len(on_lines)
    assert sorted(on_lines.tolist()) == list(range(first, topology.num_links))
    assert sorted(inside.tolist()) == list(range(first))


@pytest.mark.parametrize(
    ("network", "nodes", "boxes", "lines"),
    [
        ('kind = "torus"\nshape = [4, 4, 2]', 32, 32, 32 + 32 + 16),
        (
            'kind = "dragonfly"\nnodes_per_router = 2\nrouters_per_group = 8\nglobal_links_per_router = 4',
            160,
            10,
            45,
        ),
    ],
)
def test_direct_fabrics_hold_their_nodes(
    tmp_path: Path, network: str, nodes: int, boxes: int, lines: int
) -> None:
    """A 4 x 4 x 2 torus has 32 cables along x and y and 16 pairs along z; ten groups are joined by 45
    trunks."""
    path = tmp_path / "mine.toml"
    origin = 'source = "made up for a test"\nevidence = "assumed"'
    path.write_text(f'schema = 1\nextends = "dgx-h100"\n[network]\n{origin}\n{network}\n')
    found = drawn(str(path), nodes)
    assert len(found.boxes) == boxes
    assert len(found.lines) == lines
    assert len(set(found.positions().values())) == boxes


# -- The film of a step as a page of its own ---------------------------------------------------------------


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
