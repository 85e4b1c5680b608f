# Two commands on a fresh machine with Python 3.11 (and its venv) and make:
#   make demo   trains a small GPT on four ranks and shows that it equals one device bit for bit
#   make test   linter, types, unit, property, doctest, README and distributed tests
# Others: make docs builds the site, make bench the page of benchmarks, make nightly runs the long tests, make gpu the
# first hour on a GPU (make gpu DRY=1 tries it on the CPU).
# All make .venv first, if it is not there or not up to date.

PYTHON ?= python3
BIN := .venv/bin

unexport PYTHONDONTWRITEBYTECODE  # some containers set it; compiling again takes each process half a second

.PHONY: demo test docs bench gpu nightly versions clean

demo: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 examples/train_gpt.py

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal

# Simulated cases, and hostile files and command lines of each kind, run by night, from a seed of the day.
CASES ?= 100000

nightly: .venv/installed
	OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=nightly SIMULATION_CASES=$(CASES) SIMULATION_SEED=$$(date +%Y%m%d)000000 \
		FUZZING_CASES=$(CASES) FUZZING_SEED=$$(date +%Y%m%d)000000 OPTION_DRAWS=300 OPTION_SEED=$$(date +%Y%m%d)000 \
		$(BIN)/pytest -n auto --dist worksteal

bench: .venv/installed
	$(BIN)/python -m benchmarks

gpu: .venv/installed
	OMP_NUM_THREADS=1 DRY=$(DRY) $(BIN)/python -m benchmarks.gpu

docs: .venv/documented
	$(BIN)/python -m sphinx -q --fail-on-warning --keep-going -d docs/_build/doctrees docs docs/_build/html
	@echo "open docs/_build/html/index.html"

# By hand: all tests with the oldest and the newest torch that pyproject.toml declares, in each Python that is there. Each
# installs a CUDA build of some gigabytes, which runs on a CPU, too. OLDEST='numpy==1.26.* optree==0.13.*' adds the oldest
# of those.
VERSIONS ?= 2.11 2.15
PYTHONS ?= $(foreach one,python3.11 python3.12 python3.13,$(if $(shell $(one) -c 'print(1)' 2>/dev/null),$(one)))

versions: $(foreach torch,$(VERSIONS),$(foreach python,$(PYTHONS),.venv-$(torch)-$(python)/tested))

EXTRAS := .[testing,solver,integrations]

.venv-%/tested: pyproject.toml tests/requirements.txt
	$(word 2,$(subst -, ,$*)) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet 'torch==$(word 1,$(subst -, ,$*)).*' $(OLDEST) --requirement tests/requirements.txt --editable '$(EXTRAS)'
	OMP_NUM_THREADS=1 .venv-$*/bin/pytest -n auto --dist worksteal
	touch $@

.venv/installed: pyproject.toml constraints.txt tests/requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement tests/requirements.txt --editable '$(EXTRAS)'
	touch $@

.venv/documented: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement docs/requirements.txt
	touch $@

clean:
	rm -rf .venv .venv-* build docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
