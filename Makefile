# Everything a contributor types. `make` alone is safe: it prints this list.
.DEFAULT_GOAL := help
SHELL := bash
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c

# Tests start hundreds of Python processes: where this is set, each of them compiles every module anew.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := UV_PYTHON_DOWNLOADS=never $(BIN)/uv
UV_VERSION := $(shell sed -n 's/.*"uv==\([0-9.]*\)".*/\1/p' pyproject.toml)
READY := $(VENV)/.ready

.PHONY: help
help: ## Print what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 \t\2/p' $(MAKEFILE_LIST) | expand -t 24

# The environment: uv, put into it first, fills it with exactly the locked versions.
$(READY): pyproject.toml tests/pyproject.toml uv.lock
	@if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	  echo "Rota needs Python 3.11 or newer, and '$(PYTHON)' is none; name another with: make PYTHON=python3.12" >&2; exit 1
	fi
	if ! [ -x $(BIN)/uv ]; then
	  if ! $(PYTHON) -m venv --clear $(VENV); then
	    rm -rf $(VENV); echo "Python's venv module is not whole; on Debian: apt-get install python3-venv" >&2; exit 1
	  fi
	  echo "installing uv $(UV_VERSION)"
	  $(BIN)/python -m pip --quiet --disable-pip-version-check install uv==$(UV_VERSION)
	fi
	echo "installing what uv.lock names: a minute, where nothing is cached"
	$(UV) sync --quiet --locked --python $(BIN)/python
	touch $@

.PHONY: install
install: $(READY) ## Make the virtual environment in .venv, locked versions

.PHONY: demo
demo: $(READY) ## Show Rota's main job, live
	@$(BIN)/python -m ground.demo

# One worker more than cores: a test waits for half of its time. Four were tried: the load of the machine was 11 to 14.
PYTEST := $(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 20

.PHONY: test
test: $(READY) ## Run the tests of every push, on real parts: minutes
	@$(BIN)/python -m ground build
	$(PYTEST) -m "not slow"

.PHONY: test-all
test-all: test ## Run every test that this machine can run: the quick ones, then the slow ones
	$(PYTEST) -m slow

# As in its image: Python imports compiled modules instead of the pure ones.
.PHONY: test-compiled
test-compiled: $(READY) # run the tests of the sidecar with its compiled modules: minutes
	@$(BIN)/python -m ground build
	compiled=$$(cd tests; ../$(BIN)/python -m compiled)
	ROTA_COMPILED=1 PYTHONPATH=$$compiled $(PYTEST) -m "not slow" tests/unit/project/test_compiled_modules.py \
	  tests/unit/brokers tests/unit/sidecar tests/brokers tests/sidecar

.PHONY: kind
kind: $(READY) # test an installation in a cluster that kind makes: needs Docker
	@ROTA_GROUND_CLUSTER=kind $(BIN)/pytest --durations 20 tests/e2e

.PHONY: unit
unit: $(READY) ## Run the tests that need nothing but Python: seconds
	@$(BIN)/pytest --numprocesses 3 --dist worksteal tests/unit

.PHONY: check
check: $(READY) ## Run all static checks: format, lint, types, import contracts, dependencies, spelling, YAML, docs
	@export PATH="$(abspath $(BIN)):$$PATH"
	ruff format --check --quiet || { echo "not formatted; make format" >&2; exit 1; }
	ruff check --quiet
	mypy
	lint-imports
	deptry operator
	codespell
	yamllint --strict .
	$(DOCS) --quiet
	uv lock --check --quiet --python $(BIN)/python

# Strict: a broken link or anchor, or a page that the navigation lacks, is an error.
DOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: docs
docs: $(READY) # build the documentation site into build/site
	@$(DOCS)

.PHONY: format
format: $(READY) ## Format the code and mend what can be mended by itself
	@$(BIN)/ruff format
	$(BIN)/ruff check --fix

.PHONY: presubmit
presubmit: check test-compiled test ## Run what CI runs

.PHONY: ground
ground: $(READY) ## Stand the ground up and leave it: control plane, local pods, broker
	@$(BIN)/python -m ground up

.PHONY: ground-down
ground-down: $(READY) ## Take the ground down
	@$(BIN)/python -m ground down

.PHONY: bench
bench: $(READY) ## Measure Rota and its peers on the same work, print ratios
	@$(BIN)/python -m bench

.PHONY: compare
compare: $(READY) ## Do the same to fleets of Rota's and of Java consumers, print one table; WRITE=README.md puts it there
	@$(BIN)/python -m bench.compare $(EVENTS) $(if $(WRITE),--write $(WRITE))

.PHONY: soak
soak: $(READY) ## What chance finds, for an hour and a half: nonsense for decoders, real fleets with troubles, simulated ones
	@cd tests
	results=
	run() { # run all of them, and print their results at the end
	  if ../$(BIN)/python -m "$$@"; then results+="$$1: passed"$$'\n'; else results+="$$1: failed (see above)"$$'\n'; fi
	}
	run fuzz --first $(or $(FIRST),2000) --seconds $(or $(FUZZ),60)
	run sidecar --first $(or $(FIRST),0) --seconds $(or $(FLEETS),1800)
	run e2e --first $(or $(FIRST),0) --seconds $(or $(NODE),1200)
	run simulation --first $(or $(FIRST),1000) --seconds $(or $(SIMULATED),1800)
	printf '\n%s' "$$results"; ! grep -q failed <<< "$$results"

.PHONY: mutants
mutants: $(READY) ## Plant small bugs in the core, and see which tests notice; or in FILES="..."
	@PYTHONHASHSEED=1 $(BIN)/python tests/mutants.py $(FILES) # sets of names have the same order in each run

.PHONY: release-check
release-check: $(READY) ## Make everything of a release twice, check it, and put it into dist/
	@cd tests
	../$(BIN)/python -m release
