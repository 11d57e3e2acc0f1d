# Needs Python 3.11, 3.12 or 3.13, make and a network, nothing else: every target makes its own environment first.
# The first that runs; pyenv leaves commands on the path for versions that are not active.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -c '' 2> /dev/null && echo $$p && break; done)
# The environment made here may hold torch for the CPU alone; a machine with a GPU usually has its own.
GPU_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS_VENV := .venv-peers
PEER_STAMPS := $(patsubst benchmarks/peers/%.txt,$(PEERS_VENV)/%/.installed,$(wildcard benchmarks/peers/*.txt))
CLIENTS_VENV := .venv-clients
ENGINES_VENV := .venv-engines
STEPS_PEERS := accelerate fabric lightning

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-pages test-clients test-engines test-all check bench bench-test gpu house docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The stamp is newer than what it was made from, so that a second run installs nothing.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2> /dev/null \
	    || { echo "expected Python 3.11, 3.12 or 3.13; name one: make PYTHON=python3.12"; exit 1; }
	@echo "installing into $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

demo: $(STAMP) ## train the masked language model on four logical devices, then show that it is exact
	@$(BIN)/lockstep train mlm --devices cpu:4 --epochs 8 --batch-size 32 --vocabulary 4000 --dropout 0 \
	    --output runs/demo --overwrite --check-exact

# Three processes on any number of cores: many tests wait for workers that were killed or hosts that do not come.
# With bytecode, where the environment says to write none: each of hundreds of processes would compile the sources anew.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal

test: $(STAMP) ## run the tests that guard the promises (six minutes on two cores)
	@$(PYTEST) -m "not slow"

test-slow: $(STAMP) $(PEERS_VENV)/keras_hub/.installed ## run the tests that `make test` leaves out (twenty minutes or more on two cores)
	@$(PYTEST) -m "slow and not pages"

test-pages: $(STAMP) ## run the tutorials and the commands of the documentation's pages, as their readers do
	@$(PYTEST) -m "slow and pages"

test-clients: $(CLIENTS_VENV)/.installed ## run the trainers and batches of other libraries, in an environment of their own
	@$(CLIENTS_VENV)/bin/python -m pytest -n 2 --dist worksteal tests/clients

test-engines: $(ENGINES_VENV)/.installed ## run trainings inside Ray, in an environment of its own
	@$(ENGINES_VENV)/bin/python -m pytest tests/engines

test-all: $(STAMP) $(PEERS_VENV)/keras_hub/.installed ## run every test (half an hour on two cores)
	@$(PYTEST)

check: $(STAMP) ## lint, formatting, types for every supported Python, and the order of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@for version in 3.11 3.12 3.13; do $(BIN)/mypy --python-version $$version || exit 1; done
	@$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_python_versions.py

# make bench lists the suites; make bench SUITE=cpu ARGS="--rounds 1" runs one.
bench: $(STAMP) ## measure a suite beside others and write a dated table: make bench SUITE=cpu; without SUITE: list them
	@$(BIN)/python -m benchmarks $(SUITE) $(ARGS)

bench-test: $(STAMP) ## run the quick tests of the benchmarks, which make test leaves out
	@$(BIN)/python -m pytest -q -n 3 --dist worksteal -m "not slow" benchmarks/tests

ifeq ($(SUITE),peers)
bench: $(filter-out $(PEERS_VENV)/lightning/%,$(PEER_STAMPS))
endif
ifeq ($(SUITE),steps)
bench: $(STEPS_PEERS:%=$(PEERS_VENV)/%/.installed)
endif

# Each framework has an environment of its own. Where one cannot be made, the table says that the framework did not run.
$(PEERS_VENV)/%/.installed: benchmarks/peers/%.txt
	@echo "installing into $(PEERS_VENV)/$* (once; hundreds of megabytes)"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@if $(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<; then touch $@; \
	    else echo "$(PEERS_VENV)/$* could not be made; the benchmark goes on without it"; fi

$(CLIENTS_VENV)/.installed: tests/clients/requirements.txt pyproject.toml constraints.txt
	@echo "installing into $(CLIENTS_VENV) (once; a few minutes)"
	@test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	@$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $< \
	    -e '.[train,transformers]' datasets peft pytest pytest-timeout pytest-xdist
	@# torchvision for CUDA does not import beside torch for CPUs, and transformers, which finds it installed, neither.
	@$(CLIENTS_VENV)/bin/python -c "import torchvision" 2>/dev/null || \
	    $(CLIENTS_VENV)/bin/python -m pip uninstall --quiet --yes torchvision
	@touch $@

# 1.6 GB and little more than a minute, on the machine of docs/reference/hardware.md.
$(ENGINES_VENV)/.installed: tests/engines/requirements.txt pyproject.toml constraints.txt
	@echo "installing into $(ENGINES_VENV) (once; a few minutes)"
	@test -x $(ENGINES_VENV)/bin/python || $(PYTHON) -m venv $(ENGINES_VENV)
	@$(ENGINES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $< \
	    -e '.[train]' pytest pytest-timeout
	@touch $@

# For the tests of the program of examples/published that needs it: 45 MB, seconds. Its package asks for TensorFlow,
# hence no dependencies.
$(PEERS_VENV)/keras_hub/.installed: tests/examples/keras_hub.txt $(STAMP)
	@echo "installing into $(@D) (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) -r $<
	@touch $@

# Any machine with a CUDA GPU, whatever else it has: nothing is installed, nothing fetched. docs/how-to/gpu.md says more.
gpu: ## run the tests that need a GPU and measure on it, in eight minutes: make gpu GPU_PYTHON=python3
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(sys.version_info < (3, 11))' 2> /dev/null \
	    || { echo "$(GPU_PYTHON) is no Python 3.11 or later with torch; name one that is: make gpu GPU_PYTHON=~/venv/bin/python"; exit 1; }
	@PYTHONPATH=src:. $(GPU_PYTHON) -m benchmarks gpu --tests tests $(ARGS)

house: $(STAMP) ## count in the source what its readers asked for: names, comments, lines, calls of a step
	@$(BIN)/python -m tests.house

docs: $(STAMP) ## build the documentation, warnings being errors
	@$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean: ## remove the environment and everything built
	rm -rf $(VENV) $(PEERS_VENV) $(CLIENTS_VENV) $(ENGINES_VENV) build dist docs/_build runs .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
