# make demo        four synthetic hospitals train FedSM under NVIDIA FLARE; prints the result table and the report's path
# make test        ruff, mypy, the site and every test, the end-to-end ones too; with Python 3.12 it fails below 95 % of the package's lines
# make test-fast   ruff, mypy and the tests that start no FLARE processes
# make docs        the documentation as a site in site/; a link or reference that leads nowhere fails it
# make release     wheel, sdist and bill of materials in dist/, each distribution installed in a clean environment and tried
# make lock        requirements.lock and requirements-torch.lock anew from pyproject.toml and constraints.txt (needs uv)
# make clean       remove everything that these commands made
#
# Needs Python 3.10, 3.11 or 3.12 with pip; everything else goes into .venv, once, and again when pyproject.toml or
# constraints.txt change. Another interpreter: make demo PYTHON=/usr/bin/python3.11

VENV      ?= .venv
WORKERS   ?= 3
WORKSPACE ?= workspace/demo
BIN       := $(VENV)/bin
PIP       := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
# Python 3.12 counts lines at next to no cost; with earlier ones tests would take half as long again.
COVERAGE   = $(shell $(BIN)/python -c 'import sys; print("--cov --cov-report=term:skip-covered --cov-report=xml" * (sys.version_info >= (3, 12)))')
PYTEST    := python -m pytest --durations=30 --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
FITS      := import sys; raise SystemExit(not (3, 10) <= sys.version_info[:2] <= (3, 12))

# Several sites share the cores, so each computes on one thread.
export OMP_NUM_THREADS ?= 1
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: demo test test-fast lint docs release lock clean

demo: $(VENV)/.installed
	rm -rf $(WORKSPACE)
	nvflare simulator jobs/fedsm -n 4 -t 4 -w $(WORKSPACE); status=$$?; medflare results $(WORKSPACE) && exit $$status

# File by file in three processes (WORKERS), which two cores can serve: end-to-end tests wait for FLARE's processes most of their time. Each
# process takes up to 4 GB.
test: $(VENV)/.installed-dev
	$(MAKE) --jobs=2 --output-sync=target lint docs
	COVERAGE_CORE=sysmon $(PYTEST) $(COVERAGE)

test-fast: lint
	$(PYTEST) -m "not slow and not e2e"

lint: $(VENV)/.installed-dev
	ruff check .
	ruff format --check .
	lint-imports
	mypy

# The variable silences an advertisement for MkDocs' successor. Not --quiet: warnings that are not printed do not fail a build.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

release: $(VENV)/.installed-dev
	.ci/release

# torch and what only its CUDA builds bring have a file of their own: which build of torch is right depends on the machine.
lock:
	uv pip compile pyproject.toml --extra export --extra privacy --extra dicomseg --extra pretrained --extra transformers \
		--constraint constraints.txt --python-version 3.11.5 --universal --generate-hashes \
		--no-annotate --no-header \
		| awk '/^[a-z]/ { file = "requirements" (/^(torch|triton|cuda-.*|nvidia-.*)==/ ? "-torch" : "") ".lock" } { print > file }'

clean:
	rm -rf $(VENV) workspace build dist site custom/*.egg-info .coverage coverage.xml .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/.created
	@if test -t 1; then quiet=; else quiet=--quiet; fi; set -e; \
	echo "medflare: installing torch, by far the largest package (1 of 2)"; \
	$(PIP) $$quiet setuptools "$$(grep '^torch==' constraints.txt)"; \
	echo "medflare: installing medflare and the packages it needs (2 of 2)"; \
	$(PIP) $$quiet --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@if test -t 1; then quiet=; else quiet=--quiet; fi; \
	echo "medflare: installing what the tests need"; \
	$(PIP) $$quiet --no-build-isolation --editable ".[dev,dicomseg,docs,export,pretrained,privacy,transformers]"
	@touch $@

# Debian's Python comes without ensurepip; there, pip of the interpreter itself fills the environment.
$(VENV)/.created:
	@for candidate in $(or $(PYTHON),python3 python3.12 python3.11 python3.10); do \
		if $$candidate -c '$(FITS)' 2>/dev/null; then found=$$candidate; break; fi; \
	done; \
	if test -z "$$found"; then \
		echo "medflare needs Python 3.10, 3.11 or 3.12 and found none$(if $(PYTHON), in PYTHON=$(PYTHON));" \
			"name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; \
		exit 1; \
	fi; \
	echo "medflare: making $(VENV) with $$($$found --version)"; \
	$$found -m venv $(VENV) >/dev/null 2>&1 \
		|| { $$found -m venv --without-pip $(VENV) && $$found -m pip --python $(BIN)/python install --quiet pip; }
	@touch $@
