# `make` lists the targets. Everything runs from an own virtual environment in .venv.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup lint test quickstart bench docs-check format clean
.NOTPARALLEL:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
CODE := flowrl pipelines rewards configs tests assets docs
PROSE := README.md CHANGELOG.md CONTRIBUTING.md Makefile docs flowrl pipelines rewards configs
PYTEST_ARGS ?=

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## .venv with flowrl (editable) and its development tools; at once if nothing changed
	@:

# torch comes from the package index that pip is set up for. For another build of it (CPU only, another
# CUDA), install that one into .venv first: pip keeps what satisfies pyproject.toml.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) is not there: make setup PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "flowrl needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
			"Name another one: make setup PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing flowrl and its tools into $(VENV), once; torch makes this take some minutes"
	@$(BIN)/python -m pip install -qq --editable '.[dev]'
	@touch $@

lint: setup  ## ruff, formatting, types, spelling
	$(BIN)/ruff check $(wildcard $(CODE))
	$(BIN)/ruff format --check $(wildcard $(CODE))
	$(BIN)/mypy
	$(BIN)/codespell $(wildcard $(PROSE))

test: lint  ## lint, then all tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

quickstart: setup  ## trains the small shapes model on this machine's CPU; ends with a table, before and after
	@$(BIN)/flowrl train configs/quickstart.yaml --fresh

bench: setup  ## time and memory of one training iteration against its bare forward and backward passes
	@$(BIN)/flowrl bench

docs-check: setup  ## runs the examples and follows the links of the documentation
	$(BIN)/codespell $(wildcard README.md CHANGELOG.md CONTRIBUTING.md docs)
	$(BIN)/python -m pytest -q tests/test_docs_examples.py

format: setup  ## formats, and mends what ruff can mend
	$(BIN)/ruff check --fix $(wildcard $(CODE))
	$(BIN)/ruff format $(wildcard $(CODE))

clean:  ## removes caches and build output; keeps .venv and runs
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
