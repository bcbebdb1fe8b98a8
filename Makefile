# `make demo` and `make test` do everything from a fresh clone on, including the set-up of .venv with pip.

# On Windows, make needs the bash of Git: the recipes use sed, touch and rm.
ifeq ($(OS),Windows_NT)
SHELL   := bash
PYTHON  ?= python
BIN     := Scripts
else
PYTHON  ?= python3
BIN     := bin
endif
VENV    := .venv
PY      := $(VENV)/$(BIN)/python
# -qq: pip prints errors only.
PIP     := $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt
DEV     := $(VENV)/.installed-dev
BENCH   := $(VENV)/.installed-bench
SITE    := $(VENV)/.installed-site
# TensorFlow, JAX and TRL have many dependencies of their own, hence a separate environment.
FRAMEWORKS := .venv-integrations
# Libraries of attribution: bergson, captum and kronfluence have many dependencies, too.
ATTRIBUTION := .venv-attribution
# Trainers for `make audit-trainers`, in the newest versions and with the last transformers 4.
AUDIT := .venv-audit
AUDIT_OLD := .venv-transformers-4.57.6
# Libraries that `make evidence` compares with. Laplace requires torchvision, which has no build for a CPU-only torch.
EVIDENCE := .venv-evidence
# Data of `make evidence`, which the project does not ship. benchmarks/evidence/nanogpt.py and wrong_labels.py say where
# to get the first two; the third is Debian's package dataset-fashion-mnist.
SHAKESPEARE ?= data/tinyshakespeare.txt
MNIST       ?= data
# `make test-torch TORCH=2.8.0` tests with another torch version, and with another Python version by PYTHON=python3.12.
TORCH_VENV  ?= .venv-torch-$(TORCH)
# `make test-transformers TRANSFORMERS=4.57.6` tests the Hugging Face integration with another version of transformers.
TRANSFORMERS_VENV  ?= .venv-transformers-$(TRANSFORMERS)
TRANSFORMERS_TESTS ?= $(filter-out %_trl.py %_pairs.py,$(wildcard tests/integrations/test_h*f*.py))
# Not run: tests of the report, the documents, the types and the distributions, which hardly depend on torch.
TORCH_TESTS ?= $(filter-out $(addprefix tests/,report/ release/ typing/ __pycache__/),$(wildcard tests/*/)) \
	$(filter-out tests/test_docs.py,$(wildcard tests/test_*.py))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-integrations test-torch test-transformers lint format docs bench comparison attribution audit-trainers batch-size evidence migration site clean

help:
	@echo 'make demo        train a small network on digits and find the wrong labels'
	@echo 'make test        lint and run the tests'
	@echo 'make test-all    lint and run all tests, including the slow ones'
	@echo 'make test-integrations'
	@echo '                 run all tests with Hugging Face, TRL, peft, Lightning, Accelerate and the backends of Keras'
	@echo 'make test-torch  run the tests with another torch version, for example TORCH=2.8.0'
	@echo 'make test-transformers'
	@echo '                 run the tests of Hugging Face with another version of transformers, for example TRANSFORMERS=4.57.6'
	@echo 'make lint        run ruff, mypy and import-linter'
	@echo 'make lock        write lock.txt: the newest versions of all packages for development that constraints.txt allows'
	@echo 'make api         record the public names and signatures in tests/public_api.txt'
	@echo 'make dist        build the sdist and the wheel, and try the wheel in clean environments, with each extra'
	@echo 'make format      format the code and apply automatic fixes with ruff'
	@echo 'make bench       run the benchmarks against Opacus, BackPACK, torch.func, JAX and a plain loop (an hour)'
	@echo 'make bench QUICK=1'
	@echo '                 run the benchmarks of samplewise alone, in less than three minutes'
	@echo 'make comparison  run the correctness and training-loop tests of docs/comparison.md'
	@echo 'make attribution make the tables of docs/attribution-measurements.md, beside bergson, traker, dattri, kronfluence and captum'
	@echo '                 (an hour at first; continues where it stopped)'
	@echo 'make audit-trainers'
	@echo '                 make the table of docs/audit.md: trainers of other libraries, audited with sw.audit (15 minutes;'
	@echo '                 continues where it stopped)'
	@echo 'make batch-size  make the tables and the picture of docs/batch-size.md (TEXT=file of the character model; 20'
	@echo '                 minutes; continues where it stopped)'
	@echo 'make evidence    make the tables of docs/evidence.md: published results, reproduced (two hours; continues where it'
	@echo '                 stopped; WRITE=1 replaces the tables; SHAKESPEARE=file, MNIST=directory with the data)'
	@echo 'make docs        generate docs/reference.md from the docstrings, docs/gpu.md from reports, notebooks of'
	@echo '                 tutorials, and pictures whose script is newer'
	@echo 'make site        build the documentation site into build/site and test it in a browser'
	@echo 'make migration   run the code of the migration pages against both libraries, and measure one number each'
	@echo 'make clean       remove the virtual environments and all caches'

# ------------------------------------------------------------------------------ environment
# Stamp files: nothing is installed again unless the requirements have changed.

$(VENV)/pyvenv.cfg:
	@echo 'creating the virtual environment $(VENV)'
	@$(PYTHON) -m venv $(VENV)

$(DEV): pyproject.toml constraints.txt lock.txt | $(VENV)/pyvenv.cfg
	@echo 'installing samplewise and the development tools into $(VENV)'
	@$(PIP) -c lock.txt -e '.[dev]'
	@touch $@

$(BENCH): benchmarks/requirements.txt constraints.txt $(DEV)
	@echo 'installing the libraries for the comparison into $(VENV)'
	@$(PIP) -r benchmarks/requirements.txt
	@$(PIP) --no-deps backpack-for-pytorch==1.7.1
	@touch $@

$(SITE): docs/requirements.txt constraints.txt $(DEV)
	@echo 'installing the generator of the documentation site into $(VENV)'
	@$(PIP) -r docs/requirements.txt
	@touch $@

$(FRAMEWORKS)/.installed: tests/integrations/requirements.txt constraints.txt pyproject.toml
	@echo 'installing samplewise, the development tools and all frameworks into $(FRAMEWORKS)'
	@$(PYTHON) -m venv $(FRAMEWORKS)
	@$(FRAMEWORKS)/$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
		-r tests/integrations/requirements.txt -e '.[dev]'
	@touch $@

# bergson and kronfluence require torchvision and torchaudio and use neither. The wheels of PyPI do not load beside a
# build of torch without CUDA, and transformers, which bergson imports, fails if they are there and do not load.
$(ATTRIBUTION)/.installed: benchmarks/attribution-requirements.txt constraints.txt pyproject.toml
	@echo 'installing samplewise and other attribution libraries into $(ATTRIBUTION)'
	@$(PYTHON) -m venv $(ATTRIBUTION)
	@$(ATTRIBUTION)/$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
		-r benchmarks/attribution-requirements.txt -e '.[train]'
	@$(ATTRIBUTION)/$(BIN)/python -m pip uninstall -qq -y torchvision torchaudio
	@touch $@

# fastai and Composer require versions of torch or torchvision that are not installed.
$(AUDIT)/.installed: benchmarks/audit-requirements.txt constraints.txt pyproject.toml
	@echo 'installing samplewise and the trainers of other libraries into $(AUDIT)'
	@$(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
		-r benchmarks/audit-requirements.txt -e '.[huggingface,lightning,keras]'
	@$(AUDIT)/$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps fastai==2.8.12 mosaicml==0.32.1
	@touch $@

$(EVIDENCE)/.installed: benchmarks/evidence/requirements.txt constraints.txt pyproject.toml
	@echo 'installing samplewise and the libraries of the evidence scripts into $(EVIDENCE)'
	@$(PYTHON) -m venv $(EVIDENCE)
	@$(EVIDENCE)/$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
		-r benchmarks/evidence/requirements.txt -e '.[train,ledger,privacy]'
	@$(EVIDENCE)/$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps \
		backpack-for-pytorch==1.7.1 curvlinops-for-pytorch==3.0.1 laplace-torch==0.3
	@touch $@

# The other pins stay: they work with torch 2.8 and newer, except executorch and torchao, which fail with torch 2.8.
# executorch requires torchao, and transformers imports it if it is installed.
$(TORCH_VENV)/.installed: pyproject.toml constraints.txt
	@$(if $(TORCH),,echo 'TORCH must be a version of torch; found none. Use for example: make test-torch TORCH=2.8.0'; exit 2)
	@echo 'installing samplewise, the development tools and torch $(TORCH) into $(TORCH_VENV)'
	@$(PYTHON) -m venv $(TORCH_VENV)
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(TORCH_VENV)/constraints.txt
	@$(TORCH_VENV)/$(BIN)/python -m pip install -qq --disable-pip-version-check -c $(TORCH_VENV)/constraints.txt -e '.[dev]'
	@$(TORCH_VENV)/$(BIN)/python -c 'import torchao' 2> /dev/null || $(TORCH_VENV)/$(BIN)/python -m pip uninstall -qq -y torchao
	@touch $@

$(TRANSFORMERS_VENV)/.installed: pyproject.toml constraints.txt
	@$(if $(TRANSFORMERS),,echo 'TRANSFORMERS must be a version of transformers; found none. Use for example: make test-transformers TRANSFORMERS=4.57.6'; exit 2)
	@echo 'installing samplewise, the development tools and transformers $(TRANSFORMERS) into $(TRANSFORMERS_VENV)'
	@$(PYTHON) -m venv $(TRANSFORMERS_VENV)
	@sed 's/^transformers==.*/transformers==$(TRANSFORMERS)/' constraints.txt > $(TRANSFORMERS_VENV)/constraints.txt
	@$(TRANSFORMERS_VENV)/$(BIN)/python -m pip install -qq --disable-pip-version-check \
		-c $(TRANSFORMERS_VENV)/constraints.txt -e '.[dev]'
	@touch $@

# ----------------------------------------------------------------------------------- targets

demo: $(DEV)
	@$(PY) -m samplewise.cli.demo

# Lint runs beside the tests: mypy uses one core for half a minute.
test: $(DEV)
	@$(MAKE) --no-print-directory -j 2 lint pytest

test-all: $(DEV)
	@$(MAKE) --no-print-directory -j 2 lint pytest-all

.PHONY: pytest pytest-all

pytest:
	$(PY) -m pytest -q -n 2

# -m overrides the marker expression in pyproject.toml.
pytest-all:
	$(PY) -m pytest -q -n 2 -m 'not site' --hypothesis-profile=explore

test-integrations: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/$(BIN)/python -m pytest -q -n 2 -m '' tests/integrations

test-torch: $(TORCH_VENV)/.installed
	$(TORCH_VENV)/$(BIN)/python -m pytest -q -n 2 $(TORCH_TESTS)

test-transformers: $(TRANSFORMERS_VENV)/.installed
	$(TRANSFORMERS_VENV)/$(BIN)/python -m pytest -q -n 2 -m '' $(TRANSFORMERS_TESTS)

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/$(BIN)/lint-imports --no-logo

format: $(DEV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

.PHONY: api dist lock

# A new environment, so that packages of earlier versions and of the comparison are not listed.
lock:
	@rm -rf build/lock
	@$(PYTHON) -m venv build/lock
	@build/lock/$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@echo '# All packages of the development environment, made by `make lock`. constraints.txt has the reasons.' > lock.txt
	@build/lock/$(BIN)/python -m pip freeze --all --exclude pip --exclude-editable | sed 's/+.*//' >> lock.txt
	@rm -rf build/lock

api: $(DEV)
	@$(PY) tests/public_api.py

# The sdist and the wheel in dist/, checked, and tried in clean environments below build/: without extras and with each.
dist: $(DEV)
	@$(PY) tests/release/distributions.py

# `make bench QUICK=1` takes less than three minutes after the installation. `make bench WRITE=1` replaces the tables in
# the documents.
bench: $(BENCH)
	@$(PY) benchmarks/run.py $(if $(QUICK),--quick) $(if $(WRITE),--write docs/speed.md README.md)

comparison: $(BENCH)
	@$(PY) benchmarks/comparison.py
	@$(PY) benchmarks/loops.py

# The tests that are skipped without the other libraries are those whose name begins with test_equals.
attribution: $(ATTRIBUTION)/.installed
	@$(ATTRIBUTION)/$(BIN)/python benchmarks/attribution.py --write docs/attribution-measurements.md
	@$(ATTRIBUTION)/$(BIN)/python -m pytest -q -m '' -k equals $(shell grep -l importorskip tests/attribution/*.py)
	@$(ATTRIBUTION)/$(BIN)/python benchmarks/attribution_trak_peers.py
	@$(ATTRIBUTION)/$(BIN)/python benchmarks/attribution_peers.py

audit-trainers: $(DEV) $(AUDIT)/.installed
	@$(MAKE) --no-print-directory TRANSFORMERS=4.57.6 $(AUDIT_OLD)/.installed
	@$(PY) benchmarks/audit_trainers.py --write docs/audit.md

batch-size: $(DEV)
	@$(PY) benchmarks/batch_size.py $(if $(TEXT),--text $(TEXT)) --write docs/batch-size.md --picture docs/batch-size.png

evidence: SCRIPTS := $(EVIDENCE)/$(BIN)/python benchmarks/evidence
evidence: TABLES := $(if $(WRITE),--write docs/evidence.md)
evidence: $(EVIDENCE)/.installed
	@$(SCRIPTS)/open_issues.py $(TABLES)
	@$(SCRIPTS)/architectures.py $(TABLES)
	@$(SCRIPTS)/critical_batch.py $(TABLES)
	@$(SCRIPTS)/wrong_labels.py $(MNIST) $(TABLES)
	@$(SCRIPTS)/nanogpt.py $(SHAKESPEARE) $(TABLES)
	@$(SCRIPTS)/privacy.py $(TABLES)

docs: $(DEV) docs/picture.png docs/ownership.png
	@$(PY) docs/reference.py
	@$(PY) docs/notebook.py
	@$(PY) docs/gpu.py

docs/picture.png: docs/picture.py | $(DEV)
	@$(PY) docs/picture.py

docs/ownership.png: docs/drawings.py docs/report.png | $(DEV)
	@$(PY) docs/drawings.py

# The tutorials run when their code or the library has changed: a first build takes some minutes, a second one seconds.
site: $(SITE)
	@$(PY) docs/site/build.py
	@$(PY) -m pytest -q -m site tests/site

migration: $(BENCH) $(ATTRIBUTION)/.installed
	@$(PY) benchmarks/migration.py opacus backpack vmap lightning accelerate $(if $(WRITE),--write)
	@$(ATTRIBUTION)/$(BIN)/python benchmarks/migration.py attribution $(if $(WRITE),--write)

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(ATTRIBUTION) $(AUDIT) $(EVIDENCE) .venv-torch-* .venv-transformers-* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
