# Every target sets up what it needs in .venv first, and skips that when the pins have not changed since.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TRITON := $(VENV)/triton/.installed
PINS := requirements/cpu.txt requirements/cpu-nodeps.txt requirements/dev.txt
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 $(BIN)/pip install -qq
PYTHON ?=

.PHONY: help setup quickstart test test-all lint bench docs

help:
	@echo "make quickstart  tiny model, SFT, RL against a real vLLM, a table and a page (12 minutes after set-up)"
	@echo "make test        the test suite without the slow part (12 minutes)"
	@echo "make test-all    the whole suite; GPU tests run where a GPU is"
	@echo "make lint        style, types, import contracts"
	@echo "make bench       measurements"
	@echo "make docs        docs/configuration.md from the config models"
	@echo "make setup       .venv only (Python 3.11, 2 GB)"

setup: $(STAMP)

$(BIN)/pip:
	@for python in $(PYTHON) $$(type -ap python3.11 python3 python); do \
	    if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then \
	        echo "creating $(VENV) with $$python"; exec "$$python" -m venv --clear $(VENV); \
	    fi; \
	done; \
	echo "error: Python 3.11 with venv is needed, none found on PATH;" \
	    "install it (Debian: apt install python3.11-venv) or give one: make PYTHON=/path/to/python3.11 ..." >&2; \
	exit 1

$(STAMP): $(PINS) setup.py | $(BIN)/pip
	@echo "installing into $(VENV), 1/4: torch"
	@$(PIP) "$$(grep '^torch==' requirements/cpu.txt)"
	@echo "installing into $(VENV), 2/4: Megatron-Core and what the engine needs"
	@$(PIP) -r requirements/cpu.txt
	@echo "installing into $(VENV), 3/4: vLLM, NIXL"
	@$(PIP) --no-deps -r requirements/cpu-nodeps.txt
	@echo "installing into $(VENV), 4/4: megatron_rl and development tools"
	@$(PIP) -r requirements/dev.txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@
	@echo "$(VENV) is ready"

$(TRITON): requirements/triton.txt $(STAMP)
	@echo "installing Triton beside the rest of $(VENV), for the tests of its kernels (1 GB)"
	@$(PIP) --no-deps --upgrade --target $(@D) -r $<
	@touch $@

quickstart: $(STAMP)
	@$(BIN)/megatron-rl quickstart

test: $(STAMP)
	@$(BIN)/python -m pytest -m "not slow and not gpu"

# Two tests look at the report page in a browser; as root on Debian it is installed, elsewhere they say what to do.
test-all: $(STAMP) $(TRITON)
	@type -p chromium chromium-browser google-chrome | grep -q . \
	    || { [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y chromium; } || true
	@$(BIN)/python -m pytest

lint: $(STAMP)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-logo --no-cache

bench: $(STAMP)
	@$(BIN)/python tools/bench/run.py

docs: $(STAMP)
	@$(BIN)/python -m megatron_rl.cli.docs
