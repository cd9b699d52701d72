"""Every key can be looked up, and the reference in docs/ is the one that the code makes."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.reference.pages import concepts_page, program_files_page, refusal_lines
from zsim.errors import InputError
from zsim.files import PRESETS, topologies_folder
from zsim.reference import FILES, find_keys, keys, keys_of, page_of, schema_of
from zsim.reference.pages import entry_lines, table_lines
from zsim.specs.key_index import concept_of

ROOT = Path(__file__).resolve().parents[2]
EVERY = [key for file in FILES for key in keys_of(file)]


@pytest.mark.parametrize("key", EVERY, ids=lambda key: f"{key.file}:{key.path}")
def test_every_key_has_a_sentence(key: Any) -> None:
    assert len(key.sentence) >= 7, f"{key.path}: say what it means in its Field(description=...)"
    assert not key.sentence.endswith("."), "a phrase, as it stands in a table"
    assert all((ROOT / path).is_file() for path in re.findall(r"docs/[\w/.-]+", key.sentence)), key.sentence


@pytest.mark.parametrize("key", EVERY, ids=lambda key: f"{key.file}:{key.path}")
def test_what_may_be_left_out_says_what_is_done_then(key: Any) -> None:
    """A key of several kinds of which one has a default says what the others do."""
    says = "left out" in key.sentence or "if left out" in key.sentence
    has_default = bool(key.default) and ("as the rest says" not in key.default or says)
    assert key.is_required or has_default or says, (
        f"{key.path}: give it a default, or end its Field(description=...) with '; left out: ...'"
    )


@pytest.mark.parametrize("file", FILES)
def test_the_page_in_docs_is_the_code_s(file: str, request: pytest.FixtureRequest) -> None:
    path = ROOT / "docs" / "reference" / f"{file}.md"
    text = page_of(file)
    if request.config.getoption("--update"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_the_page_of_other_words_in_docs_is_the_table_s(request: pytest.FixtureRequest) -> None:
    path = ROOT / "docs" / "reference" / "words.md"
    if request.config.getoption("--update"):
        path.write_text(concepts_page(), encoding="utf-8")
    assert path.read_text(encoding="utf-8") == concepts_page()


def test_the_tables_of_refusals_in_docs_are_the_declarations(request: pytest.FixtureRequest) -> None:
    """Between the marks of `docs/simulated.md`."""
    path = ROOT / "docs" / "simulated.md"
    begin, end = "<!-- made from the code -->\n\n", "\n\n<!-- until here -->"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    text = f"{before}{begin}{chr(10).join(refusal_lines())}{end}{rest.partition(end)[2]}"
    if request.config.getoption("--update"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text
    assert "`--qk-clip`, " in text
    assert "| `delay_wgrad_compute` | `overlap_expert_parallel` = true |" in text


@pytest.mark.parametrize("file", FILES)
def test_the_schema_in_topologies_is_the_code_s(file: str, request: pytest.FixtureRequest) -> None:
    path = ROOT / "topologies" / "schema" / f"{file}.json"
    text = json.dumps(schema_of(file), indent=1) + "\n"
    if request.config.getoption("--update"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def _keys_in(table: Any, schema: Any, root: Any, where: str) -> list[str]:
    """Keys of a parsed file that the schema does not know."""
    if "$ref" in schema:
        schema = {**root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], **schema}
    options = [schema, *(_followed(option, root) for option in schema.get("anyOf", ()))]
    known: dict[str, Any] = {}
    for option in options:
        known |= option.get("properties", {})
    free = next(
        (option["additionalProperties"] for option in options if "additionalProperties" in option), True
    )
    unknown = []
    for name, value in table.items():
        if name not in known and free is False:
            unknown.append(f"{where}{name}")
        elif name in known and isinstance(value, dict):
            unknown += _keys_in(value, known[name], root, f"{where}{name}.")
    return unknown


def _followed(option: Any, root: Any) -> Any:
    return root["$defs"][option["$ref"].rsplit("/", 1)[-1]] if "$ref" in option else option


@pytest.mark.parametrize("path", sorted(topologies_folder().glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_topology_has_only_keys_of_the_schema(path: Path) -> None:
    schema = schema_of("topology")
    assert _keys_in(tomllib.loads(path.read_text()), schema, schema, "") == []


@pytest.mark.parametrize("path", sorted((PRESETS / "experiments").glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_experiment_has_only_keys_of_the_schema(path: Path) -> None:
    schema = schema_of("experiment")
    assert _keys_in(tomllib.loads(path.read_text()), schema, schema, "") == []


SHIPPED = [
    *((path, "topology") for path in sorted(topologies_folder().glob("*.toml"))),
    *((path, "gpu") for path in sorted((topologies_folder() / "gpus").glob("*.toml"))),
    *((path, "experiment") for path in sorted((PRESETS / "experiments").glob("*.toml"))),
]


@pytest.mark.parametrize(("path", "kind"), SHIPPED, ids=lambda value: getattr(value, "stem", value))
def test_the_first_line_of_a_shipped_file_names_its_schema_to_editors(path: Path, kind: str) -> None:
    directive, _, schema = path.read_text(encoding="utf-8").splitlines()[0].partition(" ")
    assert directive == "#:schema"
    assert (path.parent / schema).resolve() == ROOT / "topologies" / "schema" / f"{kind}.json"


def test_a_key_is_found_by_its_path_its_end_and_its_table() -> None:
    assert [key.path for key in find_keys("training.micro_batch_size")] == ["training.micro_batch_size"]
    assert [key.path for key in find_keys("oversubscription")] == ["oversubscription"]
    assert [key.path for key in find_keys("spine_oversubscription")] == ["network.spine_oversubscription"]
    assert {key.table for key in find_keys("[jitter]")} == {"jitter"}
    assert find_keys("cluster.nic.bandwidth") == find_keys("nic.bandwidth"), "as --set has a topology's keys"
    assert {key.table for key in find_keys("network")} >= {"network"}, "a table's name, before a key's"


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(
        InputError, match=r"no key is called 'micro_batchsize'; did you mean 'training.micro_batch"
    ):
        find_keys("micro_batchsize")
    with pytest.raises(InputError, match="no key is called 'kv_cache'; `zsim explain` lists"):
        find_keys("kv_cache")
    with pytest.raises(InputError, match="no file is called 'topolgy'; did you mean 'topology'"):
        schema_of("topolgy")


def test_an_entry_says_type_default_kinds_and_other_programs_words() -> None:
    text = "\n".join(entry_lines(find_keys("strategy.bucket_cap_mb")[0]))
    for part in ("MiB of gradients", "default: 25.0", "kinds: ddp", "the Trainer: ddp_bucket_cap_mb"):
        assert part in text


def test_limits_are_written_in_full() -> None:
    """2^27 tokens were "at most 1.34218e+08"."""
    (entry,) = find_keys("training.lengths.low")
    assert entry.allowed == ("above 0", "at most 134,217,728")


def test_text_for_the_terminal_is_at_most_80_columns_wide() -> None:
    lines = [line for key in EVERY for line in entry_lines(key)] + list(table_lines(find_keys("training")))
    assert [line for line in lines if len(line) > 80 and not line.endswith(" file)")] == []


def test_quantities_are_strings_with_a_unit() -> None:
    assert schema_of("topology")["$defs"]["Nic"]["properties"]["bandwidth"]["type"] == ["string", "number"]
    assert "TFLOP/s" in find_keys("gpu.peak.bf16")[0].type


def test_a_concept_reads_the_keys_of_each_file_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many keys a word means: `qlora` means three."""
    read: list[str] = []

    def read_keys(file: str) -> tuple[keys.FileKey, ...]:
        read.append(file)
        return keys_of(file)

    monkeypatch.setattr(keys, "keys_of", read_keys)
    assert len(keys.explained_keys("qlora", concept_of("qlora"))) > 1
    assert read == list(FILES)


# -- The page of other programs' files is the one that their declarations make -----------------------------


PAGE = Path(__file__).resolve().parents[2] / "docs" / "files.md"


def test_the_page_of_programs_in_docs_is_the_code_s(request: pytest.FixtureRequest) -> None:
    text = program_files_page()
    if request.config.getoption("--update"):
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text


def test_a_program_says_what_is_read_refused_and_left_out() -> None:
    sections = {part.split("\n", 1)[0]: part for part in program_files_page().split("\n## ")}
    axolotl = sections["axolotl"]
    training = next(line for line in axolotl.splitlines() if line.startswith("- **training**:"))
    assert "`micro_batch_size`;" in training
    assert "`sequence_length`: `sequence_len`" in training
    assert "`relora`" in axolotl.split("Refused:")[1].split("Named in reports")[0]
    assert "`tiled_mlp`" in axolotl.split("Named in reports, not simulated:")[1]
    assert "Also the keys of the Trainer." in sections["TRL"]
    assert "`micro_batch_size`: `per_device_train_batch_size`" in sections["Trainer"]
