# make quickstart   install, run ten policies at six settings, print the table, write plots and a timeline
# make test         install everything for development, run the tests
# make test-long    thousands of mutated inputs, flipped bits, kills, audited runs, identified machines, calls of native twins, planted faults, runs that must end: docs/reference/promises.md
# make test-narrow  the tests as on a processor without vector instructions; TESTS=tests/plots for some of them
# make check        lint, types and a fast tier of the tests: a minute and a half, for every change before it is committed
# make lint         ruff and mypy
# make wheel        source distribution and wheel in dist/; the quickstart and tests with that wheel, in an empty environment
# make pure-wheel   a wheel without the native engine, in an empty environment: the demo, and the quickstart at its first setting
# make docs         the documentation as a site in site/, links checked
# make oldest       a core of the tests with the oldest releases that pyproject.toml allows, in build/oldest
# make newest       the same with the newest releases there are, in build/newest; PYTHON=python3.13 with another Python
#
# constraints.txt has the release of each package that is installed, but for `oldest` and `newest`.
# Each installs what it needs into .venv; a second call is quick.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
# The tests of the recorder need PyTorch. It comes first and alone, at one version: what depends on it would otherwise
# bring in a build with several gigabytes of CUDA.
TORCH ?= torch==2.13.0
# Bytecode is made of what is imported, when it is: a minute less than that of all files of all packages.
PIP_OPTIONS := install --quiet --no-compile
PIP_INSTALL := $(BIN)/python -m pip $(PIP_OPTIONS) --constraint constraints.txt
# The native engine is compiled at installation, where there is a C++ compiler. MOESIM_NATIVE=1: a failure is an error.
NATIVE := moesim/engine/CMakeLists.txt $(wildcard moesim/engine/native/*.[ch]pp moesim/engine/native/algorithms/*.[ch]pp)
# The tests start many processes: without bytecode each would compile all of moesim.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test collect test-narrow test-long check fast lint format docs wheel pure-wheel oldest newest clean

quickstart: $(VENV)/.installed
	$(BIN)/moesim run experiments/quickstart.yaml --out results/quickstart --jobs $(JOBS)
	@echo "plots: results/quickstart/plots; timeline for https://ui.perfetto.dev: results/quickstart/timeline.json"

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Compiles what tests import, and the tests: each of several processes would do it anew, all at the same time.
collect: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --collect-only -qq > /dev/null

test-narrow: $(VENV)/.installed-dev
	env $$($(BIN)/python tests/test_same_bytes.py "no vectors") $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(TESTS)

# One campaign after the other, whatever one of them finds; CAMPAIGN="--inputs 300" gives options.
test-long: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m long
	$(BIN)/python -m pytest -q --tb=short tests/long/campaign_*.py $(CAMPAIGN)

# Of what a wheel must do: rules on both engines, metrics, the commands.
WHEEL_TESTS := tests/engine/test_rules_*.py tests/metrics/test_metrics.py tests/cli/test_verbs.py

# Rules of the engine (on the reference alone), metrics, machines, models, algorithms, options and the order of imports: no
# processes, no figures.
FAST := engine hardware metrics model docs/test_layers.py docs/test_docstrings.py \
	policies/test_algorithms.py policies/test_registry.py policies/test_declared.py

check: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory -j 2 lint fast

fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -k 'not native' $(addprefix tests/,$(FAST))

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# As somebody else would have it: the wheel is made of the source distribution, not of the checkout, and installed where nothing
# else is. Tests of the source distribution run without the sources, which they would import otherwise.
wheel: $(VENV)/.installed-dev
	rm -rf dist build/wheel
	$(BIN)/python -m build --outdir dist .
	mkdir -p build/wheel/elsewhere build/wheel/sources
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd build/wheel/elsewhere && ../venv/bin/moesim demo && ../venv/bin/moesim run quickstart --jobs $(JOBS) && test -s results/quickstart/timeline.json \
		&& ../venv/bin/moesim regret quickstart --policies dali --quick
	tar -xzf dist/*.tar.gz -C build/wheel/sources --strip-components 1
	rm -r build/wheel/sources/moesim
	build/wheel/venv/bin/python -m pip install --quiet --constraint constraints.txt pytest hypothesis cachetools
	cd build/wheel/sources && ../venv/bin/python -m pytest -q $(WHEEL_TESTS)

# Where there is no C++ compiler: a minute, for every change; `make wheel` takes five.
pure-wheel:
	rm -rf build/pure
	mkdir -p build/pure/elsewhere
	$(PYTHON) -m venv build/pure/venv
	CXX=/nonexistent MOESIM_NATIVE= build/pure/venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/pure .
	build/pure/venv/bin/python -m pip $(PIP_OPTIONS) --constraint constraints.txt build/pure/*-none-any.whl
	cd build/pure/elsewhere && ../venv/bin/moesim demo && ../venv/bin/moesim run quickstart --quick --out results && test -s results/timeline.json

# Rules on both engines, metrics, experiments, the commands, and what every policy does to the nanosecond; without PyTorch.
CORE := $(WHEEL_TESTS) tests/experiment/test_experiment.py tests/policies/test_golden.py

oldest:
	mkdir -p build
	$(PYTHON) -c 'import tomllib; print(*(line.replace(">=", "==") for line in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]), sep="\n")' > build/oldest.txt
	$(call core,oldest,--constraint build/oldest.txt,-W default)  # old releases warn of each other

newest:
	$(call core,newest,,)

# Of a folder in build/: make an environment with options of pip, and run the core of the tests there with options of pytest.
define core
	rm -rf build/$(1)
	$(PYTHON) -m venv build/$(1)
	MOESIM_NATIVE=1 build/$(1)/bin/python -m pip $(PIP_OPTIONS) $(2) --editable . pytest pytest-xdist hypothesis cachetools
	build/$(1)/bin/python -m pytest -q -n $(JOBS) --dist worksteal $(3) $(CORE)
endef

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP_INSTALL) --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP_INSTALL) $(TORCH)
	$(PIP_INSTALL) --editable ".[dev,record,cluster,explore]"
	touch $@ $(VENV)/.installed

# What the site needs beside moesim itself, which is not built again for it.
$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $@.txt
	$(PIP_INSTALL) --requirement $@.txt
	touch $@

clean:
	rm -rf $(VENV) build dist results site .pytest_cache .mypy_cache .ruff_cache .hypothesis
