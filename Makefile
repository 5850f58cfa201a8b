# Everything a newcomer or CI needs. `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test systemd-test lint types coverage docs fuzz engine engine-test bench bench-quick clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=23.2'
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

demo: $(READY) ## Start smgd with the simulated engine and stream one answer (ARGS=--once to stop there)
	@$(BIN)/smgd demo $(ARGS)

test: $(READY) ## Run the tests (ARGS="..." goes to pytest)
	$(BIN)/pytest $(ARGS)

systemd-test: $(READY) ## Run the units under a real systemd, in namespaces of their own (root; some 40 s)
	SMGD_TEST_SYSTEMD=1 $(BIN)/pytest tests/flows/test_units.py $(ARGS)

test-stock: $(READY) ## Run the flows with HTTP/1.1 spoken by Hypercorn's stock protocols
	SMGD_TEST_HTTP_PATH=stock $(BIN)/pytest tests/flows $(ARGS)

lint: $(READY) ## Check style
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY) ## Check types
	$(BIN)/mypy

coverage: $(READY) ## Run the tests and report branch coverage
	$(BIN)/coverage erase
	@# A report, not a judgement: what is measured runs at half the speed, and that is `make test`.
	-$(BIN)/coverage run -m pytest -q $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

docs: $(READY) ## Write what is generated: docs/configuration.md and smgd.toml.example
	$(BIN)/python -m smgd.config docs > docs/configuration.md
	$(BIN)/python -m smgd.config example > smgd.toml.example

fuzz: $(READY) ## Run every fuzz target over its corpus and some seconds beyond it
	for target in fuzz/fuzz_*.py; do $(BIN)/python $$target || exit 1; done

engine: ## Build the real engine's environment (vLLM on the CPU) and its small model, outside the checkout
	$(PYTHON) tests/engine/build.py $(ARGS)

engine-test: $(READY) ## Run the tests against the real engine (after `make engine`)
	$(BIN)/pytest tests/engine $(ARGS)

bench: $(READY) ## Measure smgd beside smg 1.13 (half an hour or more; needs wrk; see docs/performance.md)
	$(BIN)/python -m tests.bench $(ARGS)

bench-quick: $(READY) ## The same for the cells with a target, in less than three minutes
	$(BIN)/python -m tests.bench --quick $(ARGS)

clean: ## Remove the environment and caches of the checkout
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info .coverage*
