# make demo: set up and run the first example.   make test: set up and run every check that CI runs.
# Needs Python 3.10 or later and make; everything else goes into .venv.  Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PAGES := README.md CHANGELOG.md CONTRIBUTING.md
SOURCES := implicitkit $(wildcard plugins) tests examples $(wildcard benchmarks) docs

.PHONY: demo test lint format slow fuzz mutants floors bench docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/python examples/quickstart.py

# mypy, which uses one core, runs beside the tests and says what it found after them.  What one process has compiled is
# kept for the others, of which tests start some dozens.
test: $(VENV)/.test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/codespell $(PAGES) $(SOURCES)
	@$(BIN)/mypy > $(VENV)/types.txt & types=$$!; \
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) -m "not slow"; tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.txt; exit $$((tests + types))

lint: $(VENV)/.test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/codespell $(PAGES) $(SOURCES)
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow

# Random problems with closed forms under random compositions of transforms: make fuzz SECONDS=3600 SEED=1
SECONDS ?= 600
SEED ?= 0
fuzz: $(VENV)/.test
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $(SEED)

# Single wrong changes of the mathematics, each against the tests that must notice it: make mutants ONLY=linear SAMPLE=20
ONLY ?=
SAMPLE ?= 0
mutants: $(VENV)/.test
	$(BIN)/python -m tests.mutants --only '$(ONLY)' --sample $(SAMPLE) --seed $(SEED)

# The oldest dependencies that pyproject.toml allows, and the newest there are, each in an environment of its own.
floors: $(VENV)/.test
	$(BIN)/python tests/floors.py

bench: $(VENV)/.bench
	set -e; for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "the site: docs/_build/html/index.html"

clean:
	rm -rf $(VENV) .floors build dist docs/_build docs/gallery docs/reference docs/scripts docs/benchmarks.md docs/modules.md *.egg-info examples/output .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up: each extra is installed once, and again when what is required changes.
$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	$(INSTALL) -e '.[$*]'
	touch $@
