# The environment is .venv; `make demo` and `make test` create it on a machine that has only Python 3.11+ and make.
PYTHON ?= python3
# One process per core; a file's tests stay together, since they share what it costs to start.
PYTEST_ARGS ?= -n auto --dist loadfile
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo demo-litellm demo-replica demo-history test lint bench clean

help:
	@echo "make demo   the main job on two replicas and two upstreams, without and with homeport"
	@echo "make demo-litellm   the same with two stock LiteLLM proxies, LiteLLM alone beside LiteLLM with homeport"
	@echo "make demo-replica   three processes that keep their responses to themselves behind a round-robin balancer, likewise"
	@echo "make demo-history   tool loops through LiteLLM at upstreams that keep no state, and at one that is lost, likewise"
	@echo "make test   lint, types, architecture and all tests"
	@echo "make lint   ruff, mypy, import-linter"
	@echo "make bench  costs as ratios against the bare app"

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/homeport demo

demo-litellm: $(STAMP)
	$(BIN)/python -m homeport_litellm.demo $(DEMO_ARGS)

demo-replica: $(STAMP)
	$(BIN)/python -m homeport_replica.demo $(DEMO_ARGS)

demo-history: $(STAMP)
	$(BIN)/python -m homeport_litellm.history_demo $(DEMO_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

bench: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV)
