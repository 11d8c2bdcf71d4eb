# Two commands matter: `make chat` and `make test`. Both work again without the network.
# PYTHON picks the interpreter the environment is made with (3.11 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# CPU machines take the torch pinned in constraints.txt; with an NVIDIA driver pip's choice stands.
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),,-c constraints.txt)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS)

.PHONY: chat test lint types check format install clean
.DEFAULT_GOAL := help

help:
	@echo "make chat     install into $(VENV), fetch the starter model, open a chat"
	@echo "make test     the same with the test tools, then the whole test suite"
	@echo "make check    ruff and mypy"
	@echo "make format   let ruff rewrite the sources"

chat: $(VENV)/installed
	@$(BIN)/llmrun chat $(ARGS)

test: $(VENV)/installed-test
	$(if $(ARGS),,$(BIN)/pytest -m thorough)
	$(BIN)/pytest $(ARGS)

check: lint types

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-test
	$(BIN)/python tests/structure/link_tree.py
	$(BIN)/mypy

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/installed

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "llmrun needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# The native library is built while installing; a changed source means installing again.
NATIVE := $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h kernels/cpu/*.inc) kernels/cpu/CMakeLists.txt

$(VENV)/installed: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/bin/python
	@echo "Installing llmrun into $(VENV) (once; this takes a minute or two)" >&2
	@$(INSTALL) -e . >&2
	@touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/bin/python
	@echo "Installing llmrun with its test tools into $(VENV)" >&2
	@$(INSTALL) -e ".[test,dev]" >&2
	@touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build
