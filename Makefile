# Every target sets up what it needs first; a second run finds it done.
.DEFAULT_GOAL := help
SHELL := /bin/bash
BIN := .venv/bin
ARGS ?=
PROMPT ?=

.PHONY: help demo serve test test-rdma sanitize sanitize-soak soak fault-schedules gpu-check lint format setup setup-dev clean \
	distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo; echo "  ARGS='...' is passed on to baton up or pytest, PROMPT='...' to the demo."

demo: setup ## start a cluster, answer a prompt, show where the time went
	@if [ -n "$$PROMPT" ]; then prompt="$$PROMPT"; else prompt="$$(cat scripts/demo-prompt.txt)"; fi; \
	$(BIN)/baton up --once "$$prompt" $(ARGS)

serve: setup ## the cluster until Ctrl-C: HTTP on 127.0.0.1:8000, gRPC on 127.0.0.1:50051
	@exec $(BIN)/baton up $(ARGS)

test: setup-dev ## the whole test suite
	@$(BIN)/python -m pytest $(ARGS)

gpu-check: setup-dev ## on a machine with a GPU: what of Baton needs one
	@if [ -e /dev/nvidiactl ]; then scripts/bootstrap.sh gpu; fi
	@$(BIN)/python scripts/gpu_check.py $(ARGS)

test-rdma: setup-dev ## the transport over verbs, on Soft-RoCE in an emulated machine
	@scripts/rdma/test.sh $(ARGS)

sanitize: setup-dev ## the native core's tests under the address, undefined-behaviour and thread sanitizers
	@scripts/sanitize.sh address && scripts/sanitize.sh thread

sanitize-soak: setup-dev ## the same for ten minutes, all of it threads at work on the transports
	@scripts/sanitize.sh address 100 && scripts/sanitize.sh thread 100

soak: setup-dev ## ten minutes of transfers that succeed, are cancelled, cut off and fenced off; what is left afterwards
	@$(BIN)/python tests/bench/soak.py --minutes 10 $(ARGS)

fault-schedules: setup-dev ## 10,000 random schedules of faults over four agents
	@$(BIN)/python tests/bench/fault_schedules.py $(ARGS)

lint: setup-dev ## style, types, layers, protos
	$(BIN)/ruff check libs services tests scripts
	$(BIN)/ruff format --check libs services tests scripts
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint

format: setup-dev ## rewrite the sources in the house style
	$(BIN)/ruff check --fix libs services tests scripts
	$(BIN)/ruff format libs services tests scripts

setup: ## install what the cluster needs, and no more
	@scripts/bootstrap.sh run

setup-dev: ## install what tests and linters need too
	@scripts/bootstrap.sh dev

clean: ## remove what builds and tools left, but not .venv
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find libs services tests -name __pycache__ -prune -exec rm -rf {} +
	rm -f .venv/.baton/native

distclean: clean ## remove .venv as well
	rm -rf .venv

export PROMPT
