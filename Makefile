# Every target sets up .venv first. On a machine with an NVIDIA GPU: make serve SERVING_EXTRAS=server,cuda13, and to
# work on it: make setup EXTRAS=dev,cuda13
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SERVING := $(VENV)/.serving
EXTRAS ?= dev
SERVING_EXTRAS ?= server
LAB_EXTRAS ?=
PYTHON ?=
export PYTHON
# Python compiles a module when it is first imported; all of them at once would take most of a minute.
INSTALL ?= $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Tests start many processes, each of which would compile all of the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup hooks demo serve test test-long test-ci test-schedules test-all test-gpu mutants lint check-wheel check-readme docs lock bench-scheduler clean

setup: $(STAMP)

$(STAMP): pyproject.toml lab/pyproject.toml
	python=$$(sh scripts/find_python.sh) && "$$python" -m venv $(VENV)
	@echo "installing the package with the tools to work on it (a minute or more)"
	$(INSTALL) -e ".[$(EXTRAS)]" -e "./lab$(if $(LAB_EXTRAS),[$(LAB_EXTRAS)])"
	touch $@

# Without the tools, which more than double the room. A .venv that has them is used as it is.
$(SERVING): pyproject.toml
	python=$$(sh scripts/find_python.sh) && "$$python" -m venv $(VENV)
	@echo "installing the package and what its server needs (a minute or more)"
	$(INSTALL) -e ".[$(SERVING_EXTRAS)]"
	touch $@

to_serve := $(if $(wildcard $(STAMP)),$(STAMP),$(SERVING))

# Checks of what is committed, before it is: lint of its files, its prose and its subject.
hooks: $(STAMP)
	$(BIN)/pre-commit install

demo: $(to_serve)
	JAX_PLATFORMS=cpu $(BIN)/pensieve demo

# Flags of the server: make serve SERVE_FLAGS=--port=9000
SERVE_FLAGS ?=
serve: $(to_serve)
	$(BIN)/pensieve serve --history=chats.sqlite $(SERVE_FLAGS)

# A file's tests share what they compile, so a file stays in one process. Files are handed out in the order of
# `conftest.py`, long ones first; pytest-xdist by itself would keep files of few tests, the longest, for the end. A
# process that ends ends the run: another in its place would wait without end for tests of the last file.
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# Most programs of tests run a few times: here they are compiled fast. XLA optimises little; its older emitters write
# a fused loop as LLVM's code directly, where the newer ones take it through MLIR, a context and a pipeline of passes
# for each; and a program is not cut for threads, as the processes of a run take all cores. For that reason numpy has
# one thread, too: others would spin while they wait for work.
FAST := OPENBLAS_NUM_THREADS=1 JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS="$$XLA_FLAGS \
--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"

# Without tests whose length is what they are for; of most there is a short one.
test: $(STAMP)
	$(FAST) $(PYTEST) -m "not long"

test-long: $(STAMP)
	$(FAST) $(PYTEST) -m long

# Both in one run: what a file's short tests compiled and started is there for its long ones.
test-ci: $(STAMP)
	$(FAST) $(PYTEST)

# Random schedules of every mode, which share SCHEDULES_S seconds. A longer search, on part k of n of the seeds:
# make test-schedules SCHEDULES_S=7200 SHARD=k/n
SCHEDULES_S ?= 300
SHARD ?= 1/1
test-schedules: $(STAMP)
	$(FAST) JAX_PLATFORMS=cpu $(BIN)/python -m tests.search_schedules --max_s=$(SCHEDULES_S) --shard=$(SHARD)

# Compiled as for serving, and as often as the tests of `test-long` were meant to be run once: it takes hours.
test-all: $(STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.search_schedules --max_s=7200 --shard=$(SHARD)
	TESTS_ALL=1 $(PYTEST) -o faulthandler_timeout=7200

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

# Not part of CI. `mutants` is an extra of its own, so that nothing else depends on it.
MUTANTS ?=
mutants: $(VENV)/.mutants
	$(FAST) JAX_PLATFORMS=cpu $(BIN)/python -m pensieve_lab.programs.run_mutants $(if $(NUM),--num=$(NUM)) $(if $(SEED),--seed=$(SEED)) \
		$(if $(ROOMS),--rooms=$(ROOMS)) $(MUTANTS)

$(VENV)/.mutants: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e "./lab[mutants]"
	touch $@

# Lines added since this revision are checked for their prose.
PROSE_SINCE ?= HEAD~1
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=lab $(BIN)/mypy -p pensieve_lab
	MYPYPATH=scripts $(BIN)/mypy --explicit-package-bases --exclude make_golden scripts
	$(BIN)/lint-imports
	$(BIN)/python scripts/dev/check_prose.py --since=$(PROSE_SINCE)

# The package as people install it, in an environment and a directory of its own.
check-wheel: $(STAMP)
	VENV=$(VENV) sh .ci/check_wheel

# The shell commands of README.md, in a copy of the checkout.
check-readme: $(STAMP)
	$(FAST) $(BIN)/python scripts/dev/run_readme.py

# A page or a docstring that Sphinx warns of fails, as does a link to a page, a heading or a file that is not there.
docs: $(STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx --quiet --fail-on-warning -b html -c docs/site . build/site

# Versions and hashes of everything that `dev` installs, for Python 3.12 on x86-64 Linux. Settings of this machine, such
# as another index, are not read: the file has no trace of them.
lock: $(STAMP)
	$(BIN)/uv pip compile --quiet --upgrade --no-config --default-index=https://pypi.org/simple --no-annotate \
		--generate-hashes --python-version=3.12 --python-platform=x86_64-manylinux_2_28 --extra=dev \
		--custom-compile-command="make lock" --output-file=requirements/dev.txt pyproject.toml

bench-scheduler: $(STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python -m pensieve_lab.programs.benchmark_scheduler

clean:
	rm -rf $(VENV)
