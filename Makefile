# Everything a checkout needs: Python >= 3.11, git and make. `make run` shows that it works.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
SEEDS ?= 100
FIRST_SEED ?= 1
BASE ?= 52e3633
RUNS ?= 5
FAULTS ?=
INJECTIONS ?= 0

.PHONY: run demo check test accept sim chaos bench bench-ab proto clean

run: $(STAMP) ## start a node in a temporary directory, hold a checked conversation, stop
	$(BIN)/python -m qim.app.cli demo --own-node

demo: $(STAMP) ## the same conversation against a running node (qim up)
	$(BIN)/python -m qim.app.cli demo

check: $(STAMP) ## style, types, layers, house rules, generated code; under two minutes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) tests/unit/test_tidy.py

test: $(STAMP) ## unit, property, contract and integration suites
	$(PYTEST) tests/unit tests/property tests/contract tests/integration tests/sim

accept: $(STAMP) ## acceptance cases of the contract (§26)
	$(PYTEST) tests/acceptance

sim: $(STAMP) ## the whole cluster in one process on a virtual clock, SEEDS=n runs from FIRST_SEED=k on (docs/testing.md)
	$(BIN)/python -m tests.sim.run --seeds $(SEEDS) --first-seed $(FIRST_SEED)

chaos: $(STAMP) ## faults on real processes under load, within 60 minutes; FAULTS=kill,pause and INJECTIONS=n select
	$(BIN)/python -m tests.chaos.run --faults "$(FAULTS)" --injections $(INJECTIONS)

bench: $(STAMP) ## costs per message and delivery, as ratios; results in bench-results/
	$(BIN)/python -m qim.app.cli bench --out bench-results

bench-ab: $(STAMP) ## this tree and an earlier commit (BASE=…), alternately: CPU, P99 and Redis bytes per message; needs a quiet box
	$(BIN)/python -m tests.bench.ab --base $(BASE) --runs $(RUNS) --kafka

proto: $(STAMP) ## regenerate qim/protocol/qim_pb2.py and .pyi from qim.proto
	cd qim/protocol && ../../$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. qim.proto

clean: ## remove everything that is not in git but the environment
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache bench-results chaos-results
	find qim tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): requirements-dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "qim needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || $(PYTHON) -m virtualenv --quiet $(VENV) || \
	  { echo "cannot make $(VENV): install your system's python3-venv package, or: pip install virtualenv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
