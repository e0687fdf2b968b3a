# Every target does its own set-up in local virtual environments. `make help` lists them.
PYTHON ?= python3.11
TORCH ?= torch==2.13.0
ENGINE ?= reference
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
VLLM_0_30 := .venv-vllm-0.30
PYTEST := $(BIN)/python -m pytest
NATIVE := $(wildcard native/src/*.cpp native/include/*.h native/CMakeLists.txt)
INSTALL := --disable-pip-version-check -q -c tests/constraints.txt -Ccmake.define.KVQUOTA_WERROR=ON

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-vllm-0.30 proto lint test test-long demo chaos bench-step bench-reclaim bench-arena bench-hotpath bench-idle-vllm bench-evict bench-overhead clean

help: ## list the targets
	@grep -hE '^[a-z0-9.-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

setup: $(VENV)/.done ## the project's environment (daemon, kvctl, reference engine, test tools)

$(VENV)/.done: pyproject.toml tests/constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(INSTALL) '$(TORCH)' -e '.[cuda12,daemon,reference,test]'
	touch $@

setup-vllm: $(VLLM)/.done ## a separate environment with vLLM 0.32 on CPU

setup-vllm-0.30: $(VLLM_0_30)/.done ## another one with vLLM 0.30

VLLM_NEEDS := pyproject.toml tests/engines/vllm-setup tests/engines/vllm-constraints.txt $(NATIVE)

$(VLLM)/.done: tests/engines/vllm-0.32-constraints.txt $(VLLM_NEEDS)
	PYTHON=$(PYTHON) tests/engines/vllm-setup $(VLLM) 0.32
	touch $@

$(VLLM_0_30)/.done: tests/engines/vllm-0.30-constraints.txt $(VLLM_NEEDS)
	PYTHON=$(PYTHON) tests/engines/vllm-setup $(VLLM_0_30) 0.30
	touch $@

proto: setup ## generate proto/kvquota/v1 anew
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --grpc_python_out=proto --pyi_out=proto proto/kvquota/v1/quota.proto

lint: setup ## ruff and mypy --strict over code and tests
	$(BIN)/ruff check .
	$(BIN)/mypy agent daemon kvctl native deploy tests

# Every seam is crossed there; test-long runs all of it.
VLLM_0_30_TESTS := tests/agent/engines tests/conformance tests/e2e/test_vllm_limits.py tests/native/test_page_queue.py

test: setup setup-vllm setup-vllm-0.30 lint ## the short form of everything, real vLLM included
	$(PYTEST) -m "not long and not vllm"
	$(VLLM)/bin/python -m pytest -m "vllm and not long"
	$(VLLM_0_30)/bin/python -m pytest -m "vllm and not long" $(VLLM_0_30_TESTS)

test-long: setup setup-vllm setup-vllm-0.30 lint ## everything at full length
	$(PYTEST) -m "not vllm"
	$(VLLM)/bin/python -m pytest -m vllm
	$(VLLM_0_30)/bin/python -m pytest -m vllm

demo: $(if $(filter vllm,$(ENGINE)),setup-vllm,setup) ## a limit is lowered while an engine sleeps: see what becomes of its memory (ENGINE=reference|vllm)
	$(if $(filter vllm,$(ENGINE)),$(VLLM)/bin,$(BIN))/python -m deploy.demo --engine $(ENGINE)

chaos: $(if $(filter vllm,$(ENGINE)),setup-vllm,setup) ## limits, kills, stops and cut connections under load (ENGINE=reference|vllm SECONDS=180 SEED= ASYNC=1)
	$(if $(filter vllm,$(ENGINE)),$(VLLM)/bin,PYTHONDEVMODE=1 $(BIN))/python -m tests.chaos --engine $(ENGINE) $(if $(ASYNC),--async) --seconds $(or $(SECONDS),180) $(if $(SEED),--seed $(SEED))

bench-step: setup ## what a step with nothing to do costs
	$(BIN)/python -m tests.bench.step

bench-reclaim: setup ## how fast memory goes back, against the bare system calls
	$(BIN)/python -m tests.bench.reclaim

bench-arena: setup ## what pages cost an engine at an A100's prices, on the stand-in driver
	$(BIN)/python -m tests.bench.arena

bench-hotpath: setup-vllm ## what the free list costs vLLM's block pool, against vLLM's own
	$(VLLM)/bin/python -m tests.bench.hotpath

bench-idle-vllm: setup-vllm ## how soon an idle vLLM has given memory back
	$(VLLM)/bin/python -m tests.bench.idle_vllm

bench-evict: setup-vllm ## what it costs vLLM's steps that one limit change evicts 30,000 cached blocks
	$(VLLM)/bin/python -m tests.bench.evict

bench-overhead: setup-vllm ## what kvquota costs vLLM while its limit is never reached: CPU seconds per token, throughput (ASYNC=1)
	$(VLLM)/bin/python -m tests.bench.overhead $(if $(ASYNC),--async)

clean: ## remove environments and build outputs
	rm -rf $(VENV) $(VLLM) $(VLLM_0_30) build dist
