# The few things people type. `make help` lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The interpreter that the environment is made from (3.11 or newer).
PYTHON ?= python3
# The study that `make demo`, `make plan` and `make check` work on.
STUDY ?= config/config.yaml
# A folder under profiles/: how much of which machine a run may use.
PROFILE ?= profiles/laptop
# More arguments for pytest, such as PYTEST_ARGS="-k patch -x".
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PACKAGES := $(VENV)/.packages
READY := $(VENV)/.ready
LOCKS := requirements/build.txt requirements/requirements.txt requirements/dev.txt

# `make setup` looks for $(PYTHON) on the path as it was found, never in the .venv it replaces.
FOUND_PATH := $(PATH)
# CMake, ninja and every program of ours come from the environment, whatever the machine has.
export PATH := $(CURDIR)/$(BIN):$(PATH)

SNAKEMAKE = $(BIN)/snakemake
OPTIONS = --profile $(PROFILE) --configfile $(STUDY)

.PHONY: help setup setup-slurm demo serving cpu-exact plan explain check test lint format lock clean-results clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(READY)  ## make .venv with everything pinned (a second run is instant)

$(PACKAGES): $(LOCKS)
	@export PATH="$(FOUND_PATH)"; \
	command -v "$(PYTHON)" >/dev/null || { \
	  echo "make setup: no '$(PYTHON)' on this machine. Install Python 3.11 or newer," \
	       "or name one: make setup PYTHON=python3.12" >&2; exit 2; }; \
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make setup: $$("$(PYTHON)" --version 2>&1) is too old, Routewise needs 3.11 or newer." \
	       "Name another one: make setup PYTHON=python3.12" >&2; exit 2; }; \
	echo "make setup: filling $(VENV) (about a minute)"; \
	base=$$("$(PYTHON)" -c 'import sys; print(sys._base_executable)'); \
	"$$base" -m venv --clear $(VENV) || { \
	  echo "make setup: '$$base -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; \
	  exit 2; }
	$(BIN)/python -m pip install -qq --require-hashes -r requirements/build.txt
	$(BIN)/python -m pip install -qq --require-hashes --no-build-isolation \
	  -r requirements/requirements.txt -r requirements/dev.txt
	@touch $@

$(READY): $(PACKAGES) pyproject.toml
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation --editable .
	@touch $@

setup-slurm: setup  ## add to .venv what submits jobs to Slurm and other schedulers (docs/cluster.md)
	$(BIN)/python -m pip install -qq --require-hashes --no-build-isolation -r requirements/slurm.txt

demo: setup  ## fetch, build, measure and report the study, up to the final table
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	  echo "make demo: no C++ compiler (c++, g++ or clang++) found, and the demo compiles llama.cpp." \
	       "On Debian and Ubuntu: apt-get install g++" >&2; exit 2; }
	$(BIN)/python -m routewise fetch $(STUDY)
	$(SNAKEMAKE) $(OPTIONS)

serving: setup  ## run config/studies/cpu-serving.yaml: what a CPU server can promise (three builds, then some 16 minutes)
	$(MAKE) demo STUDY=config/studies/cpu-serving.yaml

cpu-exact: setup  ## run config/studies/cpu-exact.yaml, the whole matrix of the patch (over an hour)
	@mkdir -p results/made
	$(BIN)/python tests/small_gguf.py results/made/rows256-f16.gguf --type f16
	$(MAKE) demo STUDY=config/studies/cpu-exact.yaml

plan: setup  ## say what `make demo` would do; pinned sources are fetched, nothing is built
	$(BIN)/python -m routewise fetch $(STUDY)
	$(SNAKEMAKE) $(OPTIONS) --dry-run

explain: setup  ## say which input of each cell that would run has changed; nothing is built
	$(BIN)/python -m routewise fetch $(STUDY)
	$(SNAKEMAKE) explain $(OPTIONS) --quiet

check: setup  ## run what is missing, then fail when a verdict is not what the study expects
	$(BIN)/python -m routewise fetch $(STUDY)
	$(SNAKEMAKE) check $(OPTIONS)

test: setup  ## run all tests, those of the formatters included
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup  ## check layout, lint and types; change nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow/rules
	$(BIN)/mypy

format: setup  ## lay the code out as lint wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile workflow/rules

lock:  ## pin requirements/*.in again (needs uv)
	requirements/lock

clean-results:  ## remove everything made under results/ but its README
	find results -mindepth 1 -maxdepth 1 ! -name README.md -exec rm -rf {} +

clean: clean-results  ## the same, and .venv and the caches
	rm -rf $(VENV) .snakemake .pytest_cache .mypy_cache .ruff_cache .hypothesis
