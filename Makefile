# The two commands that matter: make demo, make test. Each sets up what it needs.
# Kept to what GNU make 3.81 (macOS) understands.

.DEFAULT_GOAL := help
.PHONY: help demo test check format docs bench wheel clean

VENV := .venv
BIN := $(VENV)/bin
SYSTEM := $(shell uname -s)
EXTRAS := $(if $(filter Linux,$(SYSTEM)),cpu,)
COMMA := ,

# The first Python that is new enough; macOS ships an older python3.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null 2>&1 && \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && \
	echo $$p && break; done)

help:
	@echo 'make demo    score sample documents with a real local model and show the answers'
	@echo 'make test    run the tests'
	@echo 'make check   format, lint and types, and whether docs/ is what the command line says'
	@echo 'make docs    write docs/commands.md and the tables of README.md from the command line'
	@echo 'make bench   measure speed and accuracy'
	@echo 'make wheel   build the wheel, install it in a clean environment, import every module'

demo: $(VENV)/.installed
	@$(BIN)/weighbridge demo

test: $(VENV)/.installed-dev
	$(BIN)/weighbridge checkpoint demo
	$(BIN)/python tests/real_tokenizers.py
	$(BIN)/python -m pytest

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python docs/generate.py --check

docs: $(VENV)/.installed-dev
	$(BIN)/python docs/generate.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-dev
	$(BIN)/weighbridge checkpoint demo
	$(BIN)/weighbridge bench --model llama --model qwen3_5 --model embedded --output docs/performance.json
	$(BIN)/python docs/performance.py
	$(BIN)/python benchmarks/runs.py --parts cost rerun store
	$(BIN)/python benchmarks/runs.py --parts switches --times 1
	$(BIN)/python benchmarks/memory.py --parts scorer flow
	$(BIN)/python benchmarks/cli.py
	$(BIN)/python benchmarks/store.py --documents 12500
	$(BIN)/python benchmarks/sources.py --megabytes 50
	$(BIN)/python benchmarks/modes.py
	$(BIN)/python benchmarks/residency.py
	$(BIN)/python benchmarks/tickets.py
	$(BIN)/python benchmarks/sentiment.py --set yelp

wheel: $(VENV)/.installed-dev
	rm -rf build dist
	$(BIN)/python -m build --wheel --outdir dist .
	rm -rf build/clean
	$(PYTHON) -m venv build/clean
	build/clean/bin/pip install --quiet "$$(ls dist/*.whl)$(if $(EXTRAS),[$(EXTRAS)],)"
	cd build && clean/bin/python ../tests/import_every_module.py

$(VENV)/bin/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: Python 3.11 or newer is needed, found: $$(python3 --version 2>&1)"; \
		echo "hint: macOS: brew install python@3.12; Debian: apt install python3 python3-venv;"; \
		echo "hint: or name one: make demo PYTHON=/path/to/python3.12"; \
		exit 1; \
	fi
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.$(if $(EXTRAS),[$(EXTRAS)],)'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev$(if $(EXTRAS),$(COMMA)$(EXTRAS),)]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist *.egg-info
