# make up         install once, then train the quickstart until it has visibly learned (about a minute on two cores)
# make test-fast  the tests that start no process and no whole run: while you edit
# make test       lint, layer rules, types and tests: before a pull request. .ci/run runs more: the tests marked slow, SGLang, megatron, verifiers
# make soak       hours, before a release: every test, kill -9 of whole runs, mutants; writes docs/reliability.md and the tables of mutants
#                 (STEPS="tests chaos mutants" for some of these)
# make pytest     the tests of make test alone; TIER=ci adds those marked slow, TIER=soak all others
# make lint       ruff, layer rules, types, ratchets
# make docs       the pages, tables and pictures of docs/ that are made from the code: configuration, errors, metrics, the loop
# make chaos      a part of make soak: kill -9 of parts and whole runs, SIGSTOP, cut connections, damaged disks (CHAOS_ARGS="--minutes 10")
# make mutants    a part of make soak: small faults in the code, one at a time, that the tests must find (MODULES="fold kl" JOBS=16)
# make sglang-cpu     .venv-sglang: SGLang on this machine's CPU, for the tests and for engine.sglang.python (2 minutes, 2.3 GB)
# make test-sglang    the tests on that SGLang
# make test-megatron  the tests of megatron-core on its newest version, which needs Python 3.12 or 3.13: makes .venv-megatron (2 minutes, 5 GB)
# make verifiers      .venv-verifiers and .venv-openenv: verifiers 0.4 for producer.python, OpenEnv for its tests (2 minutes, 0.7 GB)
# make test-verifiers the tests of both
#
# TORCH=cpu|cuda|torch==X picks the build of torch; without it a machine with a GPU gets CUDA, any other CPU.
# TEST_ARGS=...  of scripts/run_tests.py, for make test: --retry runs once more what has not passed, as CI does.
# RUN=name   names the run; ARGS="--set tasks.max_staleness=0" is handed to streamrl up.

VENV ?= .venv
RUN ?= quickstart
ARGS ?=
PYTEST_ARGS ?= -n 4 --dist loadfile --no-loadscope-reorder
MORE_TESTS ?=
FAST_HALF = $(addprefix tests/,algorithms bench cli config contracts docs engines loop ranks tensors trainers weights)
SGLANG_PYTEST_ARGS ?= tests/sglang -o cache_dir=.pytest_cache/sglang -o timeout=400
TEST_ARGS ?=
TIER ?= test
SGLANG_VENV ?= .venv-sglang
MEGATRON_VENV ?= .venv-megatron
MEGATRON_PYTEST_ARGS ?= -m 'not soak'
VERIFIERS_VENV ?= .venv-verifiers
OPENENV_VENV ?= .venv-openenv
CHAOS_ARGS ?= --minutes 120
MODULES ?=
STEPS ?=
JOBS ?= 1
export VENV SGLANG_VENV MEGATRON_VENV VERIFIERS_VENV OPENENV_VENV
# Where it is set, every process that a test starts compiles all of streamrl again, and pytest rewrites every test file.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: up test pytest test-fast test-sglang test-megatron test-verifiers lint style types types-of-tests docs soak chaos mutants clean torch sglang-cpu verifiers
.DEFAULT_GOAL := up

up: $(VENV)/.installed
	$(VENV)/bin/streamrl up examples/quickstart/quickstart.toml --name $(RUN) $(ARGS)

test: lint pytest

# Four workers for two cores: many tests wait. The files come in the order that tests/conftest.py gives them.
pytest: $(VENV)/.installed-dev
	$(VENV)/bin/python -m scripts.run_tests --tier $(TIER) --together $(TEST_ARGS) "$(PYTEST_ARGS) --ignore=tests/sglang --ignore=tests/verifiers" $(MORE_TESTS)

# Two runs of about the same length, one of them with most of what imports torch. Each of xdist's workers would import everything and
# collect every test.
test-fast: $(VENV)/.installed-dev
	$(VENV)/bin/python -m scripts.run_tests --tier fast --together \
		"$(FAST_HALF)" "tests --ignore=tests/sglang --ignore=tests/verifiers $(addprefix --ignore=,$(FAST_HALF))"

test-sglang: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest $(SGLANG_PYTEST_ARGS)

sglang-cpu: $(SGLANG_VENV)/.installed

test-megatron: $(MEGATRON_VENV)/.installed
	OMP_NUM_THREADS=1 $(MEGATRON_VENV)/bin/python -m pytest tests/trainers/megatron $(PYTEST_ARGS) -o cache_dir=.pytest_cache/megatron $(MEGATRON_PYTEST_ARGS)

verifiers: $(VERIFIERS_VENV)/.installed

test-verifiers: $(VENV)/.installed-dev verifiers
	STREAMRL_REQUIRE=verifiers,openenv $(VENV)/bin/python -m pytest tests/verifiers -o cache_dir=.pytest_cache/verifiers

# The two runs of pyright take most of the time: they run beside each other.
lint: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target style types types-of-tests

style: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/python -m scripts.house
	$(VENV)/bin/python -m scripts.costs

types: $(VENV)/.installed-dev
	$(VENV)/bin/pyright

types-of-tests: $(VENV)/.installed-dev
	$(VENV)/bin/pyright -p tests/pyrightconfig.json

docs: $(VENV)/.installed-dev
	$(VENV)/bin/python -m scripts.docs

chaos: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest tests/kill tests/audit tests/faults $(PYTEST_ARGS)
	$(VENV)/bin/python -m tests.chaos.session $(CHAOS_ARGS); code=$$?; \
	$(VENV)/bin/python -m tests.chaos.report runs/chaos/*.jsonl && exit $$code

soak: $(VENV)/.installed-dev
	nice $(VENV)/bin/python -m scripts.soak $(STEPS)

mutants: $(VENV)/.installed-dev
	nice $(VENV)/bin/python -m scripts.mutants $(MODULES) --jobs $(JOBS)

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(MEGATRON_VENV) $(VERIFIERS_VENV) $(OPENENV_VENV) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# Set-up is done once and stamped; TORCH=... on the command line asks for it again.
$(VENV)/.installed: pyproject.toml requirements.lock scripts/install.sh $(if $(TORCH),torch)
	scripts/install.sh

$(SGLANG_VENV)/.installed: scripts/install.sh $(wildcard scripts/sglang_cpu/*.txt scripts/sglang_cpu/stubs/*.py)
	scripts/install.sh sglang-cpu

$(VERIFIERS_VENV)/.installed: scripts/install.sh $(wildcard scripts/verifiers/*.txt)
	scripts/install.sh verifiers

$(MEGATRON_VENV)/.installed: pyproject.toml requirements.lock scripts/install.sh
	scripts/install.sh megatron

$(VENV)/.installed-dev: pyproject.toml requirements.lock scripts/install.sh $(if $(TORCH),torch)
	scripts/install.sh dev
	touch $(VENV)/.installed
