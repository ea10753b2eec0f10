# `make demo` and `make test` set everything up by themselves, in .venv inside this folder.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(RUN)/dpn finetune vtab --data demo --compare none,dpn --overwrite

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.installed
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs dist .mypy_cache .ruff_cache .pytest_cache
