# `make install`, then `make train`: see `make help`. Everything runs from the environment in .venv.
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11 python,$(shell \
            $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(p))))
BIN   := .venv/bin
STAMP := .venv/.installed
NB    ?=

.DEFAULT_GOAL := help
.PHONY: help install train test test-all sync lint types pages unit notebooks rest coverage lab door docs readme mirror gpu \
        pretended anywhere bench refresh clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

install: $(STAMP)  ## environment in .venv with everything for use, notebooks and tests

# Again only when the metadata changes. Some systems ship Python without `ensurepip`: then pip comes from outside.
# uv downloads in parallel and shows how far it is; it does not read pip's settings, so where it fails, pip installs.
$(STAMP): settings.ini setup.py
	@test -n "$(PYTHON)" || { echo "esper_nb needs Python 3.11 or newer: none found as python3. Try make install PYTHON=/path/to/python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv 2>/dev/null || { \
	  $(PYTHON) -m venv --clear --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=23' uv
	@urls() { $(BIN)/python -m pip config list | sed -n "s/^[^=]*[.]$$1='\(.*\)'$$/\1/p" | grep -o 'https*://[^ \\]*' | sed "s/^/$$2 /"; }; \
	  $(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --index-strategy unsafe-best-match \
	    $$(urls index-url --default-index) $$(urls extra-index-url --index) -e '.[dev]' || \
	  $(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@
	@echo "Installed in .venv. Next: make train, make test, make lab"

# In the middle one network is ruined on purpose. The long job looks at networks before it grows them.
SHORT_JOB := digits_impaired --updates 6 --comparison 1 --inject nan:3:30
LONG_JOB  := digits_family --updates 20 --comparison 1.75
train: $(STAMP)  ## grow networks under the Governor and compare (a minute; ARGS=--long: a harder task, ten)
	$(BIN)/esper-nb train $(if $(findstring --long,$(ARGS)),$(LONG_JOB) $(filter-out --long,$(ARGS)),$(SHORT_JOB) $(ARGS))

# One core types the library while the other one exports it again.
test: $(STAMP)  ## what a change can break: library in step, lint, types, changed pages, tests
	@$(MAKE) --no-print-directory -j 2 types sync lint
	@$(MAKE) --no-print-directory pages unit

test-all: notebooks docs rest  ## what `make test` leaves out: outputs of every page, the site, matrices, browsers

# The stages of both, cheapest first; each can be called alone.
sync: $(STAMP)  ## library in step with the notebooks, notebooks clean, README in step (changes nothing)
	@echo "== library in step with the notebooks, notebooks clean"
	@$(BIN)/python scripts/notebooks.py check

lint: $(STAMP)  ## ruff over pages, package, tests and scripts
	@echo "== lint"
	@$(BIN)/ruff check --quiet nbs esper_nb tests scripts benchmarks research

types: $(STAMP)  ## static types
	@echo "== types"
	@$(BIN)/mypy esper_nb

pages: $(STAMP)  ## run the notebooks that have changed to their ends (or NB="nbs/index.ipynb")
	@echo "== notebooks that have changed run"
	@$(BIN)/python scripts/notebooks.py quick $(NB)

# In the order of tests/conftest.py; threads that wait for work sleep, since other files need their cores. Processes that
# tests start share what is compiled; plugins that no test uses take two seconds to import, in each process.
BY_FILES = OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE= PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
  $(BIN)/pytest tests -p xdist -p rerunfailures --dist loadfile --no-loadscope-reorder --durations=10

unit: $(STAMP)  ## pytest over tests/ without matrices and browsers, two files at a time, those of what has changed first
	@echo "== tests"
	@$(BY_FILES) -n 2 -m "not slow and not browser"

notebooks: $(STAMP)  ## run every notebook in a kernel of its own and compare its text with what is stored (or NB=...)
	@echo "== every notebook shows what is stored, figures of trainings aside"
	@$(BIN)/python scripts/notebooks.py run $(NB)

rest: $(STAMP)  ## the tests that `make unit` leaves out, three files at a time: many of them wait
	@echo "== matrices and browsers"
	@$(BY_FILES) -n 3 -m "slow or browser"

anywhere: $(STAMP)  ## tests and notebooks as other processors would compute them (hours; or AS="oldest seeds")
	@$(BIN)/python scripts/anywhere.py $(AS)

coverage: $(STAMP)  ## what the tests run of the Governor's package, lines and branches (half an hour)
	$(BIN)/pytest tests -n 2 --dist loadfile -m "not browser" --cov=esper_nb/guard --cov-branch --cov-report=term-missing:skip-covered

lab: $(STAMP)  ## JupyterLab on the notebooks
	cd nbs && ../$(BIN)/jupyter lab

door: $(STAMP)  ## the front door's table of names, after names have moved
	$(BIN)/python scripts/notebooks.py door

mirror: $(STAMP)  ## how the code reads, in numbers, beside libraries that read well (those of them that are installed)
	@$(BIN)/python scripts/mirror.py
	@$(BIN)/python scripts/mirror.py --beside

readme: $(STAMP)  ## README.md from nbs/index.ipynb
	$(BIN)/python scripts/notebooks.py readme

docs: $(STAMP)  ## the site in _docs (plain HTML pages where Quarto is missing), its links and pictures checked
	$(BIN)/python scripts/docs.py

# A GPU's own image has torch and pytest in its own Python: no set-up there, and no file of tests that needs more.
CUDA_TESTS = tests/test_pretended.py $(shell grep -l "^@pytest.mark.cuda" tests/test_*.py)
GPU_PYTHON = $(if $(wildcard $(STAMP)),$(BIN)/python,python3)
gpu:  ## on a CUDA machine, in 9 minutes: the tests that need it, then its table into bench_gpu.json; again goes on
	-PYTHONPATH=. $(GPU_PYTHON) -m pytest $(CUDA_TESTS) -m "cuda and not slow" -q --continue-on-collection-errors
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu_bench --minutes 6

pretended: $(STAMP)  ## the same tests and the main job on a pretended CUDA device, on any machine (part of `make unit`)
	$(BIN)/pytest $(CUDA_TESTS) -k "pretended" -q

bench: $(STAMP)  ## the benchmarks, into nbs/explanations (hours; each alone: python -m benchmarks.lanes)
	$(BIN)/python -m benchmarks.lanes
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.faults
	$(BIN)/python -m benchmarks.detector_bench

refresh: $(STAMP)  ## run notebooks again, store their outputs, clean them: all, or NB="nbs/record/74_writers.ipynb"
	$(BIN)/nbdev-export
	$(BIN)/python scripts/notebooks.py refresh $(NB)
	$(BIN)/nbdev-clean
	$(BIN)/python scripts/notebooks.py readme

clean:  ## remove everything that is generated outside git (.venv stays)
	rm -rf _proc _docs build dist *.egg-info .pytest_cache .mypy_cache .hypothesis .quarto nbs/.last_checked
	find . -path ./.venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -print | xargs -r rm -rf
