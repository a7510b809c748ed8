# Everything a contributor types. `make help` lists it.
SHELL := /bin/bash
VENV := .venv
SDK_VENV := .venv-sdk
EXTRAS_VENV := .venv-extras
SDK_EXTRAS_VENV := .venv-sdk-extras
LIGHTNING_VENV := .venv-lightning
SITE_VENV := .venv-site
BIN := $(VENV)/bin
# What users see is tested with one thread per process: the suite starts many processes.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1

# The Pythons of constraints.txt, the one that ipurun is developed with first. PYTHON=/path/to/python chooses another one.
PYTHONS := 3.11 3.12 3.13 3.10 3.9 3.8
# find_python VERSION...: print the first interpreter of these versions that can make environments, on the path or below pyenv.
define FIND_PYTHON
find_python() { \
	for version in "$$@"; do \
		for candidate in python$$version python3 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version.*/bin/python$$version; do \
			"$$candidate" -c "import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$$version')" 2>/dev/null \
				&& echo "$$candidate" && return; \
		done; \
	done; \
}
endef
INSTALLED := --constraint constraints.txt --editable
# NEW_ENVIRONMENT: make an environment in folder $(1), with the Python that variable $(2) names or the first found of versions $(3), and install $(4).
define NEW_ENVIRONMENT
	@$(FIND_PYTHON); python="$($(2))"; python="$${python:-$$(find_python $(3))}"; \
	if [ -z "$$python" ]; then \
		echo "no Python $(3) with venv found: install one, $(firstword $(3)) for example, or name it with make $(2)=/path/to/python"; exit 1; \
	fi; \
	set -ex; \
	"$$python" -m venv $(1); \
	$(1)/bin/python -m pip install -qq --upgrade pip; \
	$(1)/bin/python -m pip install -qq $(4); \
	touch $@
endef

.DEFAULT_GOAL := help
.PHONY: help dev run test test-sdk test-extras test-extras-sdk test-slurm test-faults test-wheel bench bench-lightning bench-planner lint typecheck format docs gallery site wheel clean

help:  ## List the targets.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-15s %s\n", $$1, $$2}'

dev: $(VENV)/.test $(VENV)/.lint  ## Set up .venv with everything; again only when pyproject.toml or constraints.txt change.

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call NEW_ENVIRONMENT,$(VENV),PYTHON,$(PYTHONS),$(INSTALLED) .)

# What only tests and checks need joins the environment when they are first run.
$(VENV)/.test $(VENV)/.lint: $(VENV)/.%: $(VENV)/.installed
	$(BIN)/python -m pip install -qq $(INSTALLED) '.[$*]'
	@touch $@

run: $(VENV)/.installed  ## Train mnist on this machine.
	$(BIN)/ipurun train +recipe=mnist

test: $(VENV)/.test  ## Run the tests (no network, no IPU).
	$(TEST_ENV) $(BIN)/python -m pytest --numprocesses 2

test-sdk: $(SDK_VENV)/.test  ## Run the tests on an IPU host's stack: Python 3.8 and torch 2.0.1.
	$(TEST_ENV) $(SDK_VENV)/bin/python -m pytest --numprocesses 2

$(SDK_VENV)/.test: pyproject.toml constraints.txt
	$(call NEW_ENVIRONMENT,$(SDK_VENV),PYTHON38,3.8,$(INSTALLED) '.[test]')

# Traces are opened in Chromium if it is installed or CHROMIUM names it (TRACE_VIEWER: an HTML file for builds without chrome://tracing).
test-extras: $(EXTRAS_VENV)/.test  ## Test loggers, metrics, files and sweeps of the extras with the real libraries, on Python 3.11, and traces and pages in Chromium.
	$(TEST_ENV) $(EXTRAS_VENV)/bin/python -m pytest --override-ini python_files='check_*.py' tests/extras
	$(TEST_ENV) $(EXTRAS_VENV)/bin/python -m pytest -rs tests/profiling/test_chromium.py tests/pages/test_browser.py

$(EXTRAS_VENV)/.test: pyproject.toml constraints.txt constraints-extras.txt
	$(call NEW_ENVIRONMENT,$(EXTRAS_VENV),PYTHON,3.11,--constraint constraints-extras.txt $(INSTALLED) '.[test-extras]')

# Only the checks beside Lightning, transformers and timm: the others test libraries that do not depend on torch.
test-extras-sdk: $(SDK_EXTRAS_VENV)/.test  ## Test real LightningModules, transformers and timm on an IPU host's stack: Python 3.8 and torch 2.0.1.
	$(TEST_ENV) $(SDK_EXTRAS_VENV)/bin/python -m pytest --override-ini python_files='check_*.py' tests/extras/check_lightning.py tests/extras/check_transformers.py tests/extras/check_timm.py tests/extras/check_trainers.py

$(SDK_EXTRAS_VENV)/.test: pyproject.toml constraints.txt constraints-extras.txt
	$(call NEW_ENVIRONMENT,$(SDK_EXTRAS_VENV),PYTHON38,3.8,--constraint constraints-extras.txt $(INSTALLED) '.[test-extras-sdk]')

# SLURM, munge and root are needed; everything is in a temporary folder.
test-slurm: $(EXTRAS_VENV)/.test  ## Test sweeps on a SLURM of one node, this machine, with time-outs; skipped where SLURM is not installed.
	@if command -v slurmctld slurmd munged sbatch > /dev/null; then \
		$(TEST_ENV) tests/slurm/one_node.sh $(EXTRAS_VENV)/bin/python -m pytest --override-ini python_files='check_*.py' tests/slurm; \
	else \
		echo "skipped: SLURM is not installed here (Debian: apt install slurm-wlm)"; \
	fi

test-faults: $(VENV)/.test  ## Kill each process of runs with several, at random moments, many times.
	$(BIN)/python tests/distributed/kill_storm.py

test-wheel: wheel  ## Try the wheel in a fresh environment of every Python found; only CUDA builds of torch may be on offer, several GB each.
	@$(FIND_PYTHON); folder=$$(mktemp -d); trap "rm -rf $$folder" EXIT; wheel=$$(ls $$PWD/dist/*.whl); \
	for version in $(sort $(PYTHONS)); do \
		python=$$(find_python $$version); result="not found"; \
		if [ -n "$$python" ]; then \
			"$$python" -m venv $$folder/venv && $$folder/venv/bin/python -m pip install -qq --upgrade pip \
				&& $$folder/venv/bin/python -m pip install -qq --constraint constraints.txt "$$wheel" \
				&& (cd $$folder && venv/bin/ipurun plan +recipe=mnist devices=8 --quiet && venv/bin/ipurun train +recipe=mnist max_steps=5) \
				&& result="works with torch $$($$folder/venv/bin/python -c 'import torch; print(torch.__version__)')" \
				|| { result="fails"; failed=1; }; \
			rm -rf $$folder/*; \
		fi; \
		echo "Python $$version: $$result" | tee -a $$folder.results; \
	done; \
	echo; cat $$folder.results; rm $$folder.results; exit $${failed:-0}

bench: $(VENV)/.installed  ## Measure the CPU engine beside a hand-written loop, half precision, both starts of a compile, the training loop, how quickly commands answer, what grows, and two processes against one.
	$(BIN)/python tests/bench/engine.py
	$(BIN)/python tests/bench/half.py
	$(BIN)/python tests/bench/compile.py
	$(BIN)/python tests/bench/loop.py
	$(BIN)/python tests/bench/commands.py
	$(BIN)/python tests/bench/growth.py
	$(BIN)/python tests/bench/processes.py

bench-lightning: $(LIGHTNING_VENV)/.installed  ## Measure whole runs beside Lightning, in an environment that has it.
	OMP_NUM_THREADS=1 $(LIGHTNING_VENV)/bin/python tests/bench/beside_lightning.py

$(LIGHTNING_VENV)/.installed: pyproject.toml constraints.txt
	$(call NEW_ENVIRONMENT,$(LIGHTNING_VENV),PYTHON,3.11 3.12 3.13 3.10,$(INSTALLED) . 'lightning==2.6.*')

bench-planner: $(VENV)/.installed  ## Compare the planner with published runs that it was not fitted to.
	$(BIN)/python tests/bench/planner.py

lint: $(VENV)/.lint  ## Check style and formatting, for the oldest Python that is supported.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/.lint  ## Check types.
	$(BIN)/mypy

format: $(VENV)/.lint  ## Put the code into shape.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.test  ## Rewrite the generated reference pages, and what the examples in README.md and docs/ print.
	$(BIN)/python -m ipurun.config.reference docs/reference/config-keys.md
	$(BIN)/python tests/emulator/coverage_table.py ipurun/api/api.json tests/emulator docs/reference/emulator-coverage.md
	$(BIN)/python tests/docs_examples.py

gallery: $(VENV)/.installed  ## Draw the pictures of README.md and docs/gallery.md from real runs; needs tmux and Chromium.
	$(BIN)/python tests/gallery.py

site: $(SITE_VENV)/.installed  ## Build docs/ as a site into build/site, and check its links; it loads nothing from the network.
	NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/mkdocs build --quiet --strict --config-file docs/site/mkdocs.yml
	@echo "open build/site/index.html"

$(SITE_VENV)/.installed: pyproject.toml
	$(call NEW_ENVIRONMENT,$(SITE_VENV),PYTHON,3.11 3.12 3.13 3.10,'mkdocs-material==9.*')

wheel: $(VENV)/.installed  ## Build the wheel into dist/.
	rm -rf build dist
	$(BIN)/python -m pip wheel -qq --no-deps --wheel-dir dist .

clean:  ## Remove everything that is generated, environments included.
	rm -rf $(VENV) $(SDK_VENV) $(EXTRAS_VENV) $(LIGHTNING_VENV) $(SITE_VENV) build dist *.egg-info .ruff_cache .mypy_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
