# Two commands on a fresh machine with Python 3.10 or newer:
#   make demo     profiles a training step of AlexNet and prints its table
#   make test     passes the tests, but for the slow ones (make test-slow); make test-all passes both
# Each makes the virtual environment it needs. Another torch: make test TORCH=2.6.0. Another Python: PYTHON=python3.12.

PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv
SPEEDSCOPE ?= 1.25.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
READY := $(VENV)/ready-with-torch-$(TORCH)
TOOLS := $(VENV)/ready-with-tools-$(TORCH)
DOCS := $(VENV)/ready-with-docs-$(TORCH)
NODE := test/page/node_modules

# torch 2.13 writes two lines a session to stderr unless this is set before it is imported.
export KINETO_LOG_LEVEL ?= 99

.PHONY: demo install test test-slow test-all lint lint-page types docs messages size notebooks browser bench gpu clean

demo: $(READY)
	$(BIN)/python examples/training_step.py

# One thread for each process that runs tests: threads of several processes on the same cores wait for each other, which
# makes operators up to ten times slower.
test test-slow: export OMP_NUM_THREADS ?= 1
# Containers switch this on; then each process that runs tests would prepare all asserts itself, for 12 seconds.
test test-slow: export PYTHONDONTWRITEBYTECODE :=
# Inductor would compile and load a program for each instruction set of the processor, to see whether it can.
test-slow: export TORCHINDUCTOR_VEC_ISA_OK ?= 1
SLOW := browser or compiler or jobs
PYTEST = $(BIN)/python -m pytest -o cache_dir=build/pytest-$@ $(ARGS)
TOGETHER = -n $(PROCESSES) --dist worksteal
test: PROCESSES := auto
test-slow: PROCESSES := $(shell echo $$(($$(nproc) + 1)))  # they often wait: for other processes and for a browser
# A test that failed next to others runs once more, alone: what a test plants may drown in the load of the others.
AGAIN := --last-failed --last-failed-no-failures none

test: $(TOOLS)
	$(PYTEST) -m "not ($(SLOW))" $(TOGETHER) || { test $$? -eq 1 && $(PYTEST) $(AGAIN); }

# What make test leaves out: tests in a browser, with torch's compiler, and of whole jobs and scripts. They have processes
# of their own: in those that have compiled, all other tests take longer.
test-slow: $(TOOLS)
	$(PYTEST) -m "$(SLOW)" $(TOGETHER) || { test $$? -eq 1 && $(PYTEST) $(AGAIN); }

# Random examples: a third of those that FULL_EXAMPLES=1 make test-all tries.
test-all: test test-slow

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory lint-page; \
	else echo "No npm: the JavaScript of the HTML report is not checked." >&2; test "$$CI" != true; fi

# The JavaScript of the HTML report: its types, each file, and all files as the page has them (for unused names).
lint-page: $(TOOLS) $(NODE)/.package-lock.json
	$(NODE)/.bin/tsc -p test/page
	mkdir -p build
	$(BIN)/python -c 'from torchprof.reports.html import page_script; open("build/page.js", "wb").write(page_script().encode())'
	$(NODE)/.bin/eslint -c test/page/eslint.config.mjs torchprof/reports/page build/page.js

$(NODE)/.package-lock.json: test/page/package.json test/page/package-lock.json
	npm ci --prefix test/page --no-audit --no-fund

types: $(TOOLS)
	$(BIN)/python -m mypy

# What tests in a browser need besides Python packages; without it they are skipped. Chromium is Debian's, without its
# windows: a tab opens in a third of the time.
browser: build/speedscope
	command -v chromium-headless-shell >/dev/null || (apt-get update -qq && \
		apt-get install -qq -y --no-install-recommends chromium-headless-shell >/dev/null) || command -v chromium >/dev/null

build/speedscope:
	mkdir -p build
	cd build && npm pack --silent speedscope@$(SPEEDSCOPE) && tar -xzf speedscope-$(SPEEDSCOPE).tgz && mv package speedscope

# The documentation site, into build/site; fails on a broken link and on any warning.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Runs the notebooks of docs/notebooks, and stores what they show.
notebooks: $(TOOLS)
	cd docs/notebooks && PYTHONWARNINGS=ignore $(abspath $(BIN))/jupyter execute --inplace *.ipynb

# Every message that a user can meet, to read them side by side.
messages: $(READY)
	cd test && $(abspath $(BIN))/python -m build.messages

# Lines by feature, and what is above its ceiling in docs/size.md; ARGS=--renew writes that page anew.
size: $(READY)
	cd test && $(abspath $(BIN))/python -m build.size $(ARGS)

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

# Everything that only a GPU can show, with the Python that is there: it needs torch, tabulate and pytest, and installs
# nothing. PART=kernels for one part, ARGS="--device cpu" where there is no GPU.
gpu:
	cd test && $(PYTHON) -m gpu $(PART) $(ARGS)

# What the targets below install one after another, at once.
install: | $(BIN)/python
	$(PIP) -c constraints.txt $(NEEDED) -e '.[test,lint,docs]'
	touch $(READY) $(TOOLS) $(DOCS)

clean:
	rm -rf $(VENV) build $(NODE) *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("torchprof needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)

# numpy: torch warns on stderr where it is missing. torchprof itself does not need it.
NEEDED := torch==$(TORCH) numpy

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -c constraints.txt $(NEEDED) -e .
	touch $@

$(TOOLS): $(READY)
	$(PIP) -c constraints.txt -e '.[test,lint]'
	touch $@

$(DOCS): $(READY)
	$(PIP) -c constraints.txt -e '.[docs]'
	touch $@
