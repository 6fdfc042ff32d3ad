# Each target sets up what it needs. `make` alone lists them.

PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check bench simulate format clean python java

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) java  ## Watch a shop, its pipeline and a reader for about a minute, kill -9 included
	@$(BIN)/tidegate demo

test: $(READY) java  ## Run all tests but the long ones (PYTEST_ARGS="-k word" for some of them)
	@$(BIN)/pytest -m "not slow" $(PYTEST_ARGS)

check: $(READY)  ## Check format, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: $(READY) java  ## Measure a tick beside a bare Spark job of the same shape
	@$(BIN)/python -m bench.tick $(BENCH_ARGS)

simulate: $(READY) java  ## Run the long, seeded tests (PYTEST_ARGS="-p randomly_seed=7" repeats a run)
	@$(BIN)/pytest -m slow $(PYTEST_ARGS)

format: $(READY)  ## Format the code and mend what ruff can mend
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

clean:  ## Remove caches and build results; the virtual environment stays
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .demo src/*.egg-info
	@find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

python:
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed; '$(PYTHON)' was not found. Say 'make PYTHON=/path/to/python3.11'." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Say 'make PYTHON=python3.11'." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "'$(PYTHON)' cannot make virtual environments. Install its venv package (Debian, Ubuntu: python3-venv)." >&2; exit 1; }

java:
	@java=$${JAVA_HOME:+$$JAVA_HOME/bin/}java; \
	version=$$("$$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1); \
	[ "$${version:-0}" -ge 17 ] || { echo "Java 17 or newer is needed; '$$java' is $${version:-missing}. Install a JDK or JRE 17 and set JAVA_HOME." >&2; exit 1; }

$(READY): pyproject.toml | python
	@echo "Setting up $(VENV) (some minutes the first time: Spark and Debezium are large)."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@
