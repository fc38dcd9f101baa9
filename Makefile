# Everything lives in .venv, which is built on first use. Needs make and Python with venv, no more.

PYTHON ?= python3
PIP := .venv/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
BIN := .venv/bin

.PHONY: quickstart test test-long test-quick lint format bench clean

quickstart: .venv/.core  ## train, evaluate and sample on embedded digits; a report in runs/quickstart
	$(BIN)/ornstein quickstart

test: lint  ## lint, types and all tests, the slow ones too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "slow or not slow"

test-long: .venv/.test  ## the longest: many more processes, bounds and interrupted runs, 15 to 60 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m long

test-quick: .venv/.test  ## the tests without the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.test  ## ratios measured in one run, on this machine
	$(BIN)/python -m benchmarks.transition
	$(BIN)/python -m benchmarks.accuracy

clean:
	rm -rf .venv build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The build backend is installed through constraints.txt too, hence no build isolation.
.venv/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation -e .
	touch $@

.venv/.test: .venv/.core
	$(PIP) --no-build-isolation -e '.[test]'
	touch $@
