PYTHON ?= python3
VENV := .venv/bin/python

.PHONY: setup demo test bench lint

setup:
	@$(PYTHON) tools/setup_env.py

demo: setup
	@$(VENV) -m sp_core demo

test: setup
	@if test -e .venv/without-host; then echo "host tests: skipped, the requirements of $$(cat .venv/without-host) did not install"; fi
	$(VENV) -m pytest tests/unit tests/processes tests/distributed $$(test -e .venv/without-host || echo tests/host)

bench: setup
	@$(VENV) -m sp_core bench all

lint: setup
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	$(VENV) -m mypy sp_core
	.venv/bin/lint-imports --no-cache --no-logo
