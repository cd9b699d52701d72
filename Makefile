# make demo   the README's example: table on the terminal, HTML report and trace in demo-out/
# make test   the tests
# make fuzz   the tests on generated input, on other examples at each call
# make check  formatting, lint and types
# make check-accuracy  recorded cases, and some of the published runs, against validation/baseline.json
# make pictures  the pictures of README and docs, drawn in Chromium; the tests say when they are old
# make docs   the site, in site/, strictly: a broken link is an error
# make wheel  the wheel, in dist/, and some tests of it in an environment of its own
# make mutants  which changes of the code no test notices (mutmut; hours); not part of the tests
# make bench  speed, as ratios to this machine's raw SimPy rate
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# DeepSpeed compiles its CPU collectives at their first use, a minute that no test should wait for; within the
# environment, since torch waits without end for the lock of a compilation that was stopped
export TORCH_EXTENSIONS_DIR := $(abspath $(VENV))/torch-extensions
WARM := rm -f $(TORCH_EXTENSIONS_DIR)/*/lock && DS_ACCELERATOR=cpu timeout 900 $(BIN)/python -c \
	"from deepspeed.accelerator import get_accelerator as a; \
	a().create_op_builder('ShareMemCommBuilder').load()" > /dev/null 2>&1

.PHONY: demo test fuzz check check-accuracy docs pictures wheel format mutants bench clean

demo: $(VENV)/.installed
	$(BIN)/zsim run --out demo-out

test: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -n auto

fuzz: $(VENV)/.dev-installed
	ZSIM_HYPOTHESIS=fuzz $(BIN)/python -m pytest -n auto -m hypothesis

check: $(VENV)/.dev-installed
	$(BIN)/ruff format --check zsim tests validation examples docs/mkdocs_hooks.py docs/pictures.py
	$(BIN)/ruff check zsim tests validation examples docs/mkdocs_hooks.py docs/pictures.py
	$(BIN)/mypy

check-accuracy: $(VENV)/.dev-installed
	$(BIN)/zsim check --fast
	$(BIN)/python -m validation.published --fast

pictures: $(VENV)/.dev-installed
	$(BIN)/python docs/pictures.py

docs: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Tests lie beside the installed package, not the source, which an import would find first
WHEEL := build/wheel
wheel:
	rm -rf dist build/lib $(WHEEL) && mkdir -p $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/python -m pip --disable-pip-version-check --quiet wheel --no-deps -w dist .
	$(WHEEL)/venv/bin/python -m pip --disable-pip-version-check --quiet install dist/zsim-*.whl pytest hypothesis
	cp -r tests pyproject.toml $(WHEEL)
	cd $(WHEEL) && venv/bin/python -m pytest tests/wheel tests/golden tests/test_public_names.py tests/test_units.py

format: $(VENV)/.dev-installed
	$(BIN)/ruff format zsim tests validation examples docs/mkdocs_hooks.py docs/pictures.py
	$(BIN)/ruff check --fix zsim tests validation examples docs/mkdocs_hooks.py docs/pictures.py

# In mutants/, a copy of the code; pyproject.toml says of which files, tests/MUTANTS.md what is known of survivors
mutants: $(VENV)/.dev-installed
	$(PIP) install -e ".[mutants]"
	$(BIN)/mutmut run --max-children 1
	$(BIN)/mutmut results

bench: $(VENV)/.dev-installed
	$(BIN)/python -m pytest tests/benchmarks -m speed -n 0 -s

clean:
	rm -rf $(VENV) demo-out dist build mutants site .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# most modules of plotly and numpy are never imported: those that are get their bytecode then
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --no-compile -e .
	touch $@

$(VENV)/.docs-installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) install -e ".[docs]"
	touch $@

# torch is pinned and comes first: any other request for it would bring the CUDA build
$(VENV)/.dev-installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) install torch==2.13.0
	$(PIP) install -e ".[dev]"
	$(PIP) install -e ".[interop]" && $(WARM) || echo "accelerate, DeepSpeed, torchtitan: not all there; tests say what they skip"
	$(PIP) install --no-compile -e ".[transformers]" || echo "transformers: not there; tests say what they skip"
	touch $@ $(VENV)/.installed
