# make demo, make test: everything from a fresh clone to the result, with pip alone.

PYTHON  ?= python3
VENV    := .venv
PY      := $(VENV)/bin/python
# -qq: pip tells of errors alone.
PIP     := $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt
DEV     := $(VENV)/.installed-dev
BENCH   := $(VENV)/.installed-bench

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all lint format bench clean

help:
	@echo 'make demo      train a small net on digits and find the wrong labels among them'
	@echo 'make test      lint, then the tests'
	@echo 'make test-all  lint, then every test, the slow ones too'
	@echo 'make lint      ruff, mypy, the import law'
	@echo 'make format    let ruff rewrite what it can'
	@echo 'make bench     the benchmark, against the peers that install beside us'
	@echo 'make clean     remove the environment and every cache'

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

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
