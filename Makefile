# `make demo` and `make test` set everything up by themselves, in .venv inside this folder; `make test-oldest` runs what
# `make test` runs with the lowest versions that pyproject.toml allows, in .venv-oldest.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
RUN := $(VENV)/bin
PYTEST := -m pytest -n 2 --dist worksteal

.PHONY: demo test test-slow test-oldest lint clean

demo: $(VENV)/.installed
	$(RUN)/dpn finetune vtab --data demo --compare none,dpn --overwrite

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(RUN)/python $(PYTEST)

test-slow: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(RUN)/python $(PYTEST) -m slow

test-oldest: $(OLDEST)/.installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python $(PYTEST)

lint: $(VENV)/.installed
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q -c constraints-oldest.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) runs dist .mypy_cache .ruff_cache .pytest_cache
