# `make demo` and `make test` need nothing but Python >= 3.11 and PyPI: they make .venv themselves.
# `make test-gpu` uses the Python at hand (PYTHON=...), where torch already runs with CUDA, and
# `make bench` does where that Python has torch.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
MIN_LINE_COVERAGE := 95
PYTEST_ARGS ?=
# As many processes as cores, each with one thread: tests differ much in how long they take.
PARALLEL := -n auto --dist worksteal
SINGLE := OMP_NUM_THREADS=1
ARGS ?=

CSRC = $(shell find csrc -type f \( -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.hpp' -o -name '*.cpp' \) 2>/dev/null)
CLI = -m mqa

.PHONY: demo test test-gpu test-deep lint bench compile docs performance format clean help
.DEFAULT_GOAL := help

help:
	@echo 'demo         a first look, on any machine'
	@echo 'test         lint and the CPU tests, with coverage; compiles kernels, needs no GPU'
	@echo 'test-deep    the same tests with more examples, and the slow ones'
	@echo 'test-gpu     the tests that need a GPU, with PYTHON=$(PYTHON)'
	@echo 'bench        mqa bench $$ARGS, with PYTHON=$(PYTHON)'
	@echo 'compile      every kernel of Hopper into the cache, needs no GPU; of Blackwell: ARGS="--arch sm_100f"; of other GPUs: sm_86, ...; of CI: --covering'
	@echo 'docs         docs/api.md from signatures and docstrings'
	@echo 'performance  docs/performance.md from the reports in docs/benchmarks'
	@echo 'lint format clean'

$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(PY) $(CLI) demo $(ARGS)

test: lint
	$(SINGLE) HYPOTHESIS_PROFILE=ci $(PY) -m pytest $(PARALLEL) -m 'not slow' \
		--cov --cov-report=term --cov-report=json:.coverage.json $(PYTEST_ARGS)
	@$(PY) -c "import json, sys; t = json.load(open('.coverage.json'))['totals']; \
		p = 100 * t['covered_lines'] / max(t['num_statements'], 1); \
		sys.exit(0 if p >= $(MIN_LINE_COVERAGE) else \
		f'line coverage {p:.2f} %, expected at least $(MIN_LINE_COVERAGE) %')"

test-deep: $(STAMP)
	$(SINGLE) HYPOTHESIS_PROFILE=deep $(PY) -m pytest $(PARALLEL) $(PYTEST_ARGS)

test-gpu:
	$(PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

lint: $(STAMP)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy --strict mqa
	$(if $(CSRC),$(VENV)/bin/clang-format --dry-run -Werror $(CSRC))

format: $(STAMP)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
	$(if $(CSRC),$(VENV)/bin/clang-format -i $(CSRC))

bench: $(if $(shell $(PYTHON) -c 'import torch' 2>/dev/null && echo yes),,$(STAMP))
	$(if $^,$(PY),$(PYTHON)) $(CLI) bench $(ARGS)

compile: $(STAMP)
	$(PY) $(CLI) compile --arch sm_90a $(ARGS)

docs: $(STAMP)
	$(PY) tools/generate_docs.py

performance: $(STAMP)
	$(PY) tools/generate_performance.py

clean:
	rm -rf build dist .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find mqa tests -type d -name __pycache__ -prune -exec rm -rf {} +
