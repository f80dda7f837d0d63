# `make demo` and `make test` install what they need into .venv on first use.
PYTHON ?= python3.11
BIN := .venv/bin
CORES ?= 2

.PHONY: demo study test test-fast bench lint lock help
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.venv/.installed: envs/requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement envs/requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

demo: .venv/.installed ## train, validate and compare the tiny world (minutes on two cores)
	$(BIN)/snakemake --cores $(CORES)
	@echo "Open results/report/gallery.html in a browser; figures: results/comparisons/*/summary.csv"

study: .venv/.installed ## the same graph at a size that takes about an hour and a half on two cores
	$(BIN)/snakemake --cores $(CORES) --configfile config/study.yaml
	@echo "Open results/study/report/gallery.html in a browser"

test: .venv/.installed lint ## everything that CI checks; what measures speed runs alone
	@failed=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/benchmarks || failed=1; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore tests/benchmarks -n $(CORES) --dist loadfile --no-loadscope-reorder --durations 25 || failed=1; \
	exit $$failed

test-fast: .venv/.installed ## without the tests that take minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow"

bench: .venv/.installed ## ratios against named alternatives, in one run each
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_velocity.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_attention.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_loader.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_index.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_save.py

lint: .venv/.installed ## formatting, types, Snakemake lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/snakemake --lint

lock: ## write envs/requirements.lock from pyproject.toml in a fresh environment
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 ".[test]"
	build/lock/bin/python -m pip uninstall --quiet --yes solarwm-graph
	build/lock/bin/python -m pip freeze | sed 's/+cpu$$//' > envs/requirements.lock
