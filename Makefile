# `make help` lists the targets.
SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev train test test-slow test-processors test-cases test-cluster chaos pictures bench record check-memory lint size docs check clean

PYTHON ?= python3
EPOCHS ?= 15
N ?= 100
SEED ?= 0
ROUNDS ?= 2
MINUTES ?= 15
TASK ?= digits
RUN ?= logs/runs/digits
TRAIN_FLAGS ?=
SHELL_FILES := $(wildcard scripts/*.sh tests/cluster/lab/*.sh tests/report/*.sh) .ci/run
BIN := .venv/bin
export PYTHON

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

setup: ## Make .venv with what training needs (does nothing if it is there)
	@bash scripts/setup_env.sh requirements.txt

setup-dev: ## Make .venv with what the tests need too
	@bash scripts/setup_env.sh requirements-dev.txt

train: setup ## Train mobilenet on handwritten digits, 2 ranks (EPOCHS=15, TRAIN_FLAGS="--seed 1")
	@bash scripts/launch_distributed.sh mobilenet ddp 2 16 $(EPOCHS) $(TRAIN_FLAGS)

test: setup-dev ## Run the tests: those of units side by side, then those that start ranks or a browser themselves
	bash tests/report/install_chromium.sh & \
	    $(BIN)/python -m pytest tests/unit -n 3 --dist worksteal; status=$$?; wait; exit $$status
	$(BIN)/python -m pytest --ignore tests/unit -n 2 --dist loadfile --no-loadscope-reorder

test-slow: setup-dev ## Run the tests that take minutes each, and more variants of the others
	$(BIN)/python -m pytest -m slow

test-processors: setup-dev ## Run the tests that compute floats as other processors compute, 1 and 2 threads (half an hour)
	$(BIN)/python -m tests.processors

test-cases: setup-dev ## Run the cases from public reports (tests/cases), half an hour
	$(BIN)/python -m pytest -m cases -n 2 tests/cases

test-cluster: setup-dev ## Train on hosts made on this machine, over ssh and Slurm (root on Debian; skipped elsewhere)
	@bash tests/cluster/lab/install.sh
	$(BIN)/python -m pytest -m cluster tests/cluster

chaos: setup-dev ## Break into trainings at random moments, compare with uninterrupted ones (N=100 faults, SEED=0)
	$(BIN)/python -m tests.chaos --faults $(N) --seed $(SEED)

pictures: setup-dev ## Take the docs' pictures of a report and an audit in Chromium (RUN=digits AUDIT=logs/audits/digits/audit.html)
	$(BIN)/python -m tests.report.pictures $(RUN) $(AUDIT)

bench: ## Compare with bare DDP, ZeRO, Lightning, Accelerate, ... on CPU ranks (ROUNDS=2, MINUTES=15, QUICK=1)
	@bash scripts/setup_env.sh requirements-bench.txt
	$(BIN)/python benchmarks/compare.py --rounds $(ROUNDS) --minutes $(MINUTES) $(if $(QUICK),--quick)

check-memory: setup ## Compare the memory that is predicted for CPU ranks with what they take (up to an hour)
	$(BIN)/python benchmarks/memory.py

record: setup ## Train a preset's task with 10 seeds and write a record (TASK=digits, RECORD_FLAGS="--data FILE --seeds 3 --first-seed 10")
	$(BIN)/python benchmarks/record.py $(TASK) $(RECORD_FLAGS)

lint: setup-dev ## Run ruff, mypy, shellcheck, shfmt, and count who names a way of training (tests/fences.py)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m tests.fences
	$(BIN)/shellcheck -x $(SHELL_FILES)
	$(BIN)/shfmt -i 4 -d $(SHELL_FILES)

docs: setup-dev ## Write the pages that the code determines, build the site strictly, into site/
	$(BIN)/python -m tests.pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

size: ## Print the lines of code per room; fails where a room grew (tests/size.py)
	@$(PYTHON) -m tests.size

check: size lint test ## Everything that CI runs: lint and test

clean: ## Remove .venv and caches, never logs
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './logs/*' -prune -exec rm -rf {} +
