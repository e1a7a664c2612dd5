# Everything here works in a clean clone with Python 3.11+, make and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help install demo test test-slow check format docs clean
help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(INSTALLED)  ## create .venv and install the package with all that is tested

KERNELS := src/powernorm/ops/kernels/cpu

$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard $(KERNELS)/source/*) $(KERNELS)/building.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "powernorm needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,dev]'
	@touch $@

demo: $(INSTALLED)  ## train a small language model with five norms, print the table, write runs/demo/report.html
	$(BIN)/powernorm compare lm --preset demo --out runs/demo --resume

test: $(INSTALLED)  ## run the default suite
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

test-slow: $(INSTALLED)  ## run what the default suite leaves out
	$(BIN)/python -m pytest -m 'slow and not gpu'

check: $(INSTALLED)  ## lint, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED)  ## build the documentation into site/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict

clean:  ## remove the environment and caches
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
