# Every target but `gpu`, which takes $PYTHON or python3 as it is, first readies ./.venv, or the environment that
# ZEROX_ENV names (scripts/setup_env.sh says how), so a fresh clone needs no other step.
.PHONY: help demo test test-deep test-frameworks bench lint build rehearse gpu clean
.DEFAULT_GOAL := help
SHELL := bash
CORES := $(shell nproc)
at_most_8 = $(shell echo $$(($(1) < 8 ? $(1) : 8)))

# $(call in_env,EXTRAS): sets $$py and puts the environment's tools first.
in_env = py="$$(scripts/setup_env.sh $(1))" && export PATH="$$(dirname "$$py"):$$PATH"

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Environment variables: docs/install.md, or python -m zerox env."

demo: ## train a small GPT on 2 CPU ranks, zerox beside plain DDP; draws a picture into demo/
	@$(call in_env,demo) && OMP_NUM_THREADS="$${OMP_NUM_THREADS:-1}" \
	  "$$py" examples/train_gpt.py --ranks 2 --compare --out demo

# By file, in order: a file's tests share rank processes and builds, and tests/conftest.py has the longest first.
pytest = -m pytest -n "$(WORKERS)" --dist loadfile --no-loadscope-reorder
# Half as many again as there are cores, since ranks wait for each other; test-deep compiles, and has no core left over.
test: WORKERS ?= $(call at_most_8,$(CORES) + $(CORES) / 2)
test: ## all tests but those of test-deep, on WORKERS processes; ARGS='-k layout -x' goes to pytest
	@$(call in_env,test demo) && "$$py" $(pytest) -m 'not deep' $(ARGS)

# Only files that have such tests: to collect all takes long.
test-deep test-frameworks: WORKERS ?= $(call at_most_8,$(CORES))
test-deep: ## sanitizers, nvcc's output, the fake accelerator, builds, benchmarks, one training a pair of options
	@$(call in_env,test demo) && marks="$$("$$py" scripts/deep_tests.py)" && \
	  "$$py" $(pytest) -m "$$marks" $$(grep -rlE --include='test_*.py' 'mark\.deep$$' tests) $(ARGS)

# On two processes: each imports the frameworks and keeps ranks that did, and files share both.
test-frameworks: ## tests with Accelerate, Trainer, Lightning and others, installed into ./.venv-frameworks (0.4 GB)
	@py="$$(scripts/frameworks_env.sh)" && export PATH="$$(dirname "$$py"):$$PATH" && \
	  ZEROX_TEST_DEVICE=cpu "$$py" -m pytest -n "$(if $(filter 0 1,$(WORKERS)),$(WORKERS),2)" --dist loadfile \
	  tests/frameworks tests/gpu/test_frameworks.py $(ARGS)

bench: ## time and weigh zerox on this CPU beside what people use today; results into bench/results; ARGS='--quick'
	@$(call in_env,demo) && "$$py" -m bench $(ARGS)

lint: ## ruff, clang-format, mypy; changes nothing
	@$(call in_env,--no-build lint) && set -x && \
	  "$$py" -m ruff check . && \
	  "$$py" -m ruff format --check . && \
	  find csrc bench tests/cpp tests/accelerator -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | \
	    xargs -r clang-format --dry-run --Werror && \
	  "$$py" -m mypy zerox scripts bench

build: ## build the extension and install zerox in place (pip install -e), only where something changed
	@$(call in_env) && "$$py" -m zerox env

rehearse: ## build with CUDA kernels against a CUDA torch, no GPU needed; ARGS=FOLDER is the environment to use
	@scripts/rehearse_cuda.sh $(ARGS)

gpu: ## on a machine with a CUDA GPU: build, test, sanitize, benchmark into bench/results, in 20 minutes; ARGS='proof'
	@"$${PYTHON:-python3}" scripts/gpu.py $(ARGS)

clean: ## remove what was built; keeps ./.venv and ./.venv-frameworks
	rm -rf build dist *.egg-info zerox/_C*.so zerox/_build_info.py .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find zerox tests examples bench scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
