# make demo   set up, then grow a tree of thought on the starter model
# make test   set up, then format, lint, types and tests
#
# Both may be run again at any time. `make PYTHON=python3.12 ...` chooses the interpreter, and
# `make TORCH_INDEX=<url> ...` the index that torch alone is taken from (a CUDA or CPU build).

PYTHON ?= python3
TORCH_INDEX ?=
TORCH_VERSION := 2.13.0

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
READY := $(VENV)/.ready
NATIVE := $(wildcard CMakeLists.txt cotrt/kernels/cpu/csrc/*)
# An editable install knows which modules are packages: it is made again where a room is new.
ROOMS := $(wildcard cotrt/*/__init__.py cotrt/*/*/__init__.py)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test format lint types pytest clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# A venv holds absolute paths: one that was made in another folder is made ready again.
ifneq ($(shell cat $(READY) 2>/dev/null),$(shell pwd -P))
.PHONY: $(READY)
endif

setup: $(READY)

$(READY): pyproject.toml Makefile $(NATIVE) $(ROOMS)
	@$(PYTHON) -c 'import sys; sys.exit("cotrt needs Python 3.10 or newer; try: make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	@rm -f $(READY)
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION)
	$(PIP) install -e '.[dev]'
	@pwd -P > $(READY)

demo: setup
	$(PY) examples/tree_of_thought.py

test: setup lint types pytest

format: setup
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

lint: setup
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: setup
	$(PY) -m mypy

pytest: setup
	$(PY) -m pytest

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
