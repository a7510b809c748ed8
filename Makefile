# Everything a contributor types. `make help` lists it.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
SDK_VENV := .venv-sdk
BIN := $(VENV)/bin
# What users see is tested with one thread per process: the suite starts many processes.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1

# A Python 3.8: named by PYTHON38, on the path, or below pyenv.
FIND_PYTHON38 := for candidate in $$PYTHON38 python3.8 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.8*/bin/python3.8; do \
	"$$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 8))' 2>/dev/null && echo "$$candidate" && break; done

.DEFAULT_GOAL := help
.PHONY: help dev run test test-sdk bench bench-planner lint typecheck format docs wheel clean

help:  ## List the targets.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-14s %s\n", $$1, $$2}'

dev: $(VENV)/.installed  ## Set up .venv with everything; again only when pyproject.toml or constraints.txt change.

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $@

run: dev  ## Train mnist on this machine.
	$(BIN)/ipurun train +recipe=mnist

test: dev  ## Run the tests (no network, no IPU).
	$(TEST_ENV) $(BIN)/python -m pytest --numprocesses 2

test-sdk: $(SDK_VENV)/.installed  ## Run the tests on an IPU host's stack: Python 3.8 and torch 2.0.1.
	$(TEST_ENV) $(SDK_VENV)/bin/python -m pytest --numprocesses 2

$(SDK_VENV)/.installed: pyproject.toml constraints-sdk.txt
	@python38=$$($(FIND_PYTHON38)); \
	if [ -z "$$python38" ]; then \
		echo "no Python 3.8 found: install one (for example pyenv install 3.8) or set PYTHON38=/path/to/python3.8"; exit 1; \
	fi; \
	set -ex; \
	"$$python38" -m venv $(SDK_VENV); \
	$(SDK_VENV)/bin/python -m pip install -qq --upgrade pip; \
	$(SDK_VENV)/bin/python -m pip install -qq --constraint constraints-sdk.txt --editable '.[test]'; \
	touch $@

bench: dev  ## Measure the CPU engine beside a hand-written loop, and how quickly commands answer.
	$(BIN)/python tests/bench/engine.py
	$(BIN)/python tests/bench/commands.py

bench-planner: dev  ## Compare the planner with published runs that it was not fitted to.
	$(BIN)/python tests/bench/planner.py

lint: dev  ## Check style and formatting, for the oldest Python that is supported.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: dev  ## Check types.
	$(BIN)/mypy

format: dev  ## Put the code into shape.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: dev  ## Write the generated reference pages anew.
	$(BIN)/python -m ipurun.config.reference docs/reference/config-keys.md
	$(BIN)/python -m ipurun.emulator.coverage ipurun/manifest/api.json tests/emulator docs/reference/emulator-coverage.md

wheel: dev  ## Build the wheel into dist/.
	$(BIN)/python -m build --wheel

clean:  ## Remove everything that is generated, environments included.
	rm -rf $(VENV) $(SDK_VENV) build dist *.egg-info .ruff_cache .mypy_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
