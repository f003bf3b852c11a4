# Set-up and the two commands. Everything lives in .venv; PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: compare test test-slow lint wheel peers bench bench-kernels clean

compare: .venv/ready       ## the main job, on the embedded data set; ARGS="--dataset ..." for others
	$(BIN)/python -m experiments.compare $(ARGS)

test: .venv/ready          ## the tests, in two processes: most of their time is compilation, which takes one core
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" $(ARGS)

# Scikit-learn's checks go by themselves: they keep a thousand programs, each of some tens of memory mappings, of which
# Linux allows a process 65 530. They are dealt out by themselves, as nearly all of them are in one file. The others go by name: by their number of tests, the longest would begin last. What
# holds bit for bit is tested in machine code as users get it, too.
CHECKS := tests/test_checks_regressor.py tests/test_checks_classifier.py
test-slow: .venv/ready     ## the statistical and the wide ones, and scikit-learn's checks of all recipes
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow $(CHECKS:%=--ignore=%) $(ARGS)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow $(CHECKS) $(ARGS)
	XLA_FLAGS= $(BIN)/python -m pytest -n 2 --dist loadfile tests/test_prediction.py tests/test_training.py $(ARGS)

lint: .venv/ready          ## linters and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

wheel: .venv/ready         ## the wheel: built, installed without extras into a fresh environment, and used there
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build .
	$(PYTHON) -m venv build/env
	build/env/bin/python -m pip install --quiet build/*.whl
	cd build && env/bin/python -W error ../tests/installed.py

# The published programs that benchmarks run beside ours. get-oblique pins old versions that clash with ours, hence
# --no-deps; torch is the release that it was measured with (a build for CPUs is enough).
peers: .venv/ready         ## what benchmarks compare with
	$(BIN)/python -m pip install --quiet "torch==2.13.0" h5py pandas xgboost optuna vowpalwabbit cvxpylayers diffcp
	$(BIN)/python -m pip install --quiet --no-deps get-oblique

bench: .venv/ready         ## speed: training, prediction, ...; ARGS=--write for the committed tables
	for name in training prediction isotonic dgt get tel nongreedy sweep streaming; do $(BIN)/python -m experiments.bench_$$name $(ARGS) || exit 1; done

bench-kernels: .venv/ready ## the fused kernels on the device that is here, tuned, within 8 minutes; ARGS=--write likewise
	$(BIN)/python -m experiments.bench_kernels --tune $(ARGS)

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build results .pytest_cache .ruff_cache .hypothesis
