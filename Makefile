# Set-up and the two commands. Everything lives in .venv; PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
# Exact versions, so that a release of another package breaks nothing here. `PIP_CONSTRAINT= make test` takes the newest.
export PIP_CONSTRAINT ?= constraints.txt

.PHONY: help accelerators compare test test-slow test-wide test-clients constraints lint docs docs-examples docs-site wheel peers networks bench bench-kernels clean

help:                      ## this list
	@sed -nE 's/^([a-z-]+):.*## */  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

compare: .venv/ready       ## the main job, on the embedded data set; ARGS="--dataset ..." for others
	$(BIN)/python -m experiments.compare $(ARGS)

# A worker for each processor, because most of the time is compilation, which takes one. A worker takes up to 4 GB.
PYTEST = $(BIN)/python -m pytest -n logical --maxprocesses 16 --dist loadfile
test: .venv/ready          ## the tests, except slow ones
	$(PYTEST) $(ARGS)

# Files go by name: by their number of tests, the longest would begin last. What is marked as exact is tested in machine
# code as users get it, quick tests and slow ones.
EXACT = $(shell grep -l "mark.exact" tests/test_*.py)
test-slow: .venv/ready     ## the statistical ones and what takes long
	$(PYTEST) --no-loadscope-reorder -m "slow and not exact and not wide" $(ARGS)
	XLA_FLAGS= $(PYTEST) -m "exact and not wide" $(EXACT) $(ARGS)

test-wide: .venv/ready     ## each recipe with each loss, relation and check of scikit-learn, and whole scripts: weekly
	$(PYTEST) --no-loadscope-reorder -m "wide and not exact" $(ARGS)
	XLA_FLAGS= $(PYTEST) -m "exact and wide" $(EXACT) $(ARGS)

test-clients: export PIP_CONSTRAINT :=
test-clients:              ## the estimators in packages of others, in an environment of its own, as they pin versions: weekly
	$(PYTHON) -m venv build/clients
	build/clients/bin/python -m pip install --quiet --editable ".[tests,clients]"
	build/clients/bin/python -m pytest -m wide tests/test_clients.py $(ARGS)

# uv finds the versions for each Python from 3.11 on. It writes conditions where they differ.
COMPILE = build/constraints/bin/uv pip compile --quiet --upgrade --no-annotate --custom-compile-command "make constraints"
COMPILE += --python-version 3.11 --extra dev --extra docs pyproject.toml
constraints: export PIP_CONSTRAINT :=
constraints:               ## the newest versions for constraints.txt, and the lowest ones for .github/oldest.txt
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip install --quiet --upgrade uv
	$(COMPILE) --universal --output-file constraints.txt >/dev/null
	$(COMPILE) --resolution lowest-direct --output-file .github/oldest.txt >/dev/null

lint: .venv/ready          ## linters and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Notebooks and method pages are executed, two at a time. JTREES_DOCS_EXECUTE=cache executes only pages that changed.
# Most of the time goes into compilation, and most of that into machine code that these sizes have no use for.
docs docs-examples docs-site: export XLA_FLAGS := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
docs: docs-examples docs-site  ## the site, in build/docs: executed, every warning an error, names and links checked

docs-examples: .venv/docs
	$(BIN)/python docs/check.py docstrings

docs-site: .venv/docs
	$(BIN)/python docs/figures/relaxations.py docs/_drawn
	$(BIN)/python docs/figures/estimators.py docs/_drawn
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --jobs 2 -q -d build/doctrees -b html docs build/docs
	$(BIN)/python docs/check.py site build/docs

wheel: .venv/ready         ## the wheel: built, installed without extras into a fresh environment, and used there
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/env
	build/wheel/env/bin/python -m pip install --quiet build/wheel/*.whl
	cd build/wheel && JTREES_CACHE=0 env/bin/python -W error ../../tests/installed.py

# The published programs that benchmarks run beside ours. get-oblique pins old versions that clash with ours, hence
# --no-deps; torch is the release that it was measured with (a build for CPUs is enough).
peers: .venv/ready         ## what benchmarks compare with
	$(BIN)/python -m pip install --quiet "torch==2.13.0" h5py pandas xgboost lightgbm catboost optuna vowpalwabbit
	$(BIN)/python -m pip install --quiet --no-deps get-oblique

networks: export PIP_CONSTRAINT :=
networks:                  ## RealMLP and TabM, rivals of the studies, in an environment of their own (a torch for CPUs is enough)
	$(PYTHON) -m venv build/networks
	build/networks/bin/python -m pip install --quiet "torch==2.13.0" "pytabkit[models]==1.8.0"

bench: .venv/ready         ## speed: training, prediction, ...; ARGS=--write for the committed tables
	for name in training prediction isotonic dgt tel nongreedy sweep streaming; do $(BIN)/python -m experiments.bench_$$name $(ARGS) || exit 1; done

bench-kernels: .venv/ready ## the fused kernels on the device that is here, tuned, within 8 minutes; ARGS=--write likewise
	$(BIN)/python -m experiments.bench_kernels --tune $(ARGS)

# The compilers lie beside the environment: a plugin for GPUs would complain in each process of it that there is none.
COMPILERS := build/accelerators
accelerators: .venv/ready  ## all kernels, and a training step of each method, compiled for TPUs and an H100; weekly
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(COMPILERS) libtpu
	version=$$($(BIN)/python -c "import jax; print(jax.__version__)"); \
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(COMPILERS) jax-cuda12-plugin==$$version \
	  jax-cuda12-pjrt==$$version nvidia-cuda-nvcc-cu12 || echo "No compiler for an H100: no wheels for this Python."
	PYTHONPATH=$(COMPILERS) $(BIN)/python -m experiments.accelerators $(ARGS)

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

clean:                     ## everything that these commands made
	rm -rf docs/_drawn .venv build results .pytest_cache .ruff_cache .hypothesis
