# `make demo` and `make test` set everything up by themselves, in .venv inside this folder; `make test-oldest` runs what
# `make test` runs with the lowest versions that pyproject.toml allows, in .venv-oldest.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
RUN := $(VENV)/bin
PYTEST := -m pytest -n 2 --dist worksteal

# What `make wheels` collects for a machine with PyTorch and no network, which may lack these dependencies of dpn, with
# what they need themselves; then mmsegmentation's, which benchmarks/gpu.py measures as a peer.
WHEELS := pydantic pydantic_core annotated-types typing-inspection simplejpeg datasets dill multiprocess xxhash \
	open_clip_torch ftfy wcwidth regex timm typer typing_extensions
WHEELS += onedl-mmengine addict yapf platformdirs termcolor prettytable
# These are published as sources only.
BUILT := onedl-mmsegmentation onedl-mmcv
FOR := 3.12
LINUX := $(foreach glibc,2_28 2_27 2_24 2_17 2_12 2_5,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64

.PHONY: demo test test-slow test-oldest lint names docs mutate wheels clean

demo: $(VENV)/.installed
	$(RUN)/dpn finetune vtab --data demo --compare none,dpn --overwrite

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(RUN)/python $(PYTEST)

test-slow: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(RUN)/python $(PYTEST) -m slow

test-oldest: $(OLDEST)/.installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python $(PYTEST)

lint: $(VENV)/.installed names
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

# Names, words, docstrings and help that break the rules of CONTRIBUTING.md.
names: $(VENV)/.installed
	$(RUN)/python $(PYTEST) tests/project/test_names.py

# The site of docs/ in site/; a link that leads nowhere ends it.
docs: $(VENV)/.installed
	$(RUN)/python docs/make_commands.py
	$(RUN)/zensical build --strict --clean

# Mutants of FILE that the tests do not notice; TESTS are those of its folder where none are named. The file is changed in
# place and put back: commit first.
TESTS ?= $(dir $(patsubst dpn_cli/%,tests/%,$(patsubst tasks/%,tests/tasks/%,$(FILE))))
MUTANTS := runs/mutants/$(subst /,-,$(basename $(FILE)))
mutate: $(VENV)/.installed
	$(RUN)/python -m pip install -q -c constraints.txt -e '.[mutation]'
	git diff --quiet -- $(FILE)
	mkdir -p runs/mutants
	printf '%s\n' '[cosmic-ray]' 'module-path = "$(FILE)"' 'timeout = 300' \
		'test-command = "$(RUN)/python -m pytest -x -q $(TESTS)"' \
		'[cosmic-ray.distributor]' 'name = "local"' '[cosmic-ray.filters.operators-filter]' \
		'exclude-operators = ["core/ReplaceBinaryOperator_BitOr_.*"]' > $(MUTANTS).toml  # `int | None`
	rm -f $(MUTANTS).sqlite
	$(RUN)/cosmic-ray init $(MUTANTS).toml $(MUTANTS).sqlite
	$(RUN)/cr-filter-operators $(MUTANTS).sqlite $(MUTANTS).toml
	$(RUN)/cosmic-ray baseline $(MUTANTS).toml
	$(RUN)/cosmic-ray exec $(MUTANTS).toml $(MUTANTS).sqlite; git checkout -q -- $(FILE)
	$(RUN)/cr-report --surviving-only --show-diff $(MUTANTS).sqlite

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q -c constraints-oldest.txt -e '.[dev]'
	touch $@

wheels: $(VENV)/.installed
	$(RUN)/python -m pip download -q --no-deps --only-binary=:all: --python-version $(FOR) --implementation cp $(LINUX) \
		-c constraints.txt -d wheels $(WHEELS) $(ALSO)
	$(RUN)/python -m pip wheel -q --no-deps -c constraints.txt -w wheels $(BUILT)
	du -sh wheels

clean:
	rm -rf $(VENV) $(OLDEST) runs dist wheels site .cache .mypy_cache .ruff_cache .pytest_cache
