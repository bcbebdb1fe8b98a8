# make demo, make test: everything from a fresh clone to the result, with pip alone.

PYTHON  ?= python3
VENV    := .venv
PY      := $(VENV)/bin/python
# -qq: pip tells of errors alone.
PIP     := $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt
DEV     := $(VENV)/.installed-dev
BENCH   := $(VENV)/.installed-bench
# Training loops of others come with dependencies of their own.
LOOPS   := .venv-loops

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all lint format docs bench comparison clean

help:
	@echo 'make demo        train a small net on digits and find the wrong labels among them'
	@echo 'make test        lint, then the tests'
	@echo 'make test-all    lint, then every test, the slow ones too'
	@echo 'make lint        ruff, mypy, the import law'
	@echo 'make format      let ruff rewrite what it can'
	@echo 'make bench       the benchmark, against the peers that install beside us'
	@echo 'make comparison  whose gradients are right, and what training loops do: the tables of docs/comparison.md'
	@echo 'make docs        the reference from the docstrings; the picture, if its script is newer'
	@echo 'make clean       remove the environment and every cache'

# ------------------------------------------------------------------------------ environment
# A stamp is newer than what it was made from, so a second run installs nothing.

$(VENV)/bin/pip:
	@echo 'making $(VENV)'
	@$(PYTHON) -m venv $(VENV)

$(DEV): pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo 'installing samplewise and its tools into $(VENV)'
	@$(PIP) -e '.[dev]'
	@touch $@

$(BENCH): benchmarks/requirements.txt constraints.txt $(DEV)
	@echo 'installing the peers into $(VENV)'
	@$(PIP) -r benchmarks/requirements.txt
	@$(PIP) --no-deps backpack-for-pytorch==1.7.1
	@touch $@

$(LOOPS)/.installed: benchmarks/requirements-loops.txt constraints.txt pyproject.toml
	@echo 'installing other training loops into $(LOOPS)'
	@$(PYTHON) -m venv $(LOOPS)
	@$(LOOPS)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
		-r benchmarks/requirements-loops.txt -e '.[train]'
	@touch $@

# ----------------------------------------------------------------------------------- targets

demo: $(DEV)
	@$(PY) -m samplewise.cli.demo

test: lint
	$(PY) -m pytest -q -n 2

# The later -m wins over the one in pyproject.toml.
test-all: lint
	$(PY) -m pytest -q -n 2 -m '' --hypothesis-profile=explore

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo

format: $(DEV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(BENCH)
	@$(PY) benchmarks/run.py
	@$(PY) benchmarks/step.py
	@$(PY) benchmarks/single.py

comparison: $(BENCH) $(LOOPS)/.installed
	@$(PY) benchmarks/comparison.py
	@$(LOOPS)/bin/python benchmarks/loops.py

docs: $(DEV) docs/picture.png
	@$(PY) docs/reference.py

docs/picture.png: docs/picture.py | $(DEV)
	@$(PY) docs/picture.py

clean:
	rm -rf $(VENV) $(LOOPS) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
