# `make` lists what there is to do. ARGS="..." goes to pytest, the benchmarks or the demo.
# PYTHON=python3.12 chooses the interpreter of a new environment (`make clean` removes the old one).

VENV ?= .venv
ARGS ?=
# Twice as many as there are cores: many tests wait for servers and processes.
XDIST ?= -n $(shell expr $$(nproc) '*' 2) --dist worksteal
BIN := $(VENV)/bin
LANES = $(BIN)/python -m tools.lanes run
export PYTHON

.DEFAULT_GOAL := help
# The server that the storage of the demo needs.
DEMO_SERVER = $(patsubst postgres,postgresql,$(filter postgres redis,$(ARGS)))

.PHONY: help install test test-all test-databases test-thorough test-postgresql test-scheduler test-redis test-sandbox test-dashboard test-packaging test-spark test-spark-cluster test-spark-versions test-compat lint format mutants chaos soak conformance bench demo demo-check demo-spark messages screenshots docs wheel clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## Make the virtual environment with all that development needs

# What a change must not break, in at most 12 minutes on two cores.
test: lint ## Check the code and run the tests: on SQLite, and what depends on SQL on PostgreSQL too
	@scripts/system-packages.sh redis postgresql gettext
	@$(LANES) sqlite postgresql -- $(XDIST) $(ARGS)
	@echo "=== lanes that .ci/run adds, by the code that has changed"
	@$(BIN)/python -m tools.lanes changed --dry-run

# For nights and releases: what fails keeps nothing else from running.
test-all: install ## Run every test there is, in about 90 minutes
	@$(MAKE) --keep-going lint test-databases test-compat test-spark test-spark-cluster

test-databases: install ## Run every test on SQLite, and on PostgreSQL every one that uses the database
	@scripts/system-packages.sh redis postgresql pgbouncer chromium gettext
	@$(LANES) sqlite-all postgresql-all -- $(XDIST) $(ARGS)

test-thorough: install ## Run what `make test` leaves out because other tests cover it in another configuration
	@scripts/system-packages.sh redis postgresql pgbouncer chromium gettext
	@$(LANES) thorough -- $(XDIST) $(ARGS)

test-postgresql: install ## Run on PostgreSQL everything that uses the database and that `make test` runs on SQLite only
	@scripts/system-packages.sh redis postgresql gettext
	@$(LANES) postgresql-wide -- $(XDIST) $(ARGS)

test-scheduler: install ## Run the tests of the scheduler storage
	@scripts/system-packages.sh redis
	@$(LANES) scheduler -- $(XDIST) $(ARGS)

test-redis: install ## Run the tests of failing, slow and moved Redis servers
	@scripts/system-packages.sh redis
	@$(LANES) redis -- $(XDIST) $(ARGS)

test-sandbox: install ## Run the tests of limits, faults and sandboxes of isolated jobs
	@$(LANES) sandbox -- $(XDIST) $(ARGS)

test-dashboard: install ## Run the tests of pages in a browser, and while servers are frozen
	@scripts/system-packages.sh redis postgresql chromium
	@$(LANES) dashboard -- $(XDIST) $(ARGS)

test-packaging: install ## Run the tests of the wheel, the demo, the tools and whole projects
	@scripts/system-packages.sh redis postgresql
	@$(LANES) packaging -- $(XDIST) $(ARGS)

test-spark: $(VENV)/.spark-installed ## Run the tests that need Spark, and install it
	@scripts/system-packages.sh redis postgresql java
	@JAVA_HOME=$$(scripts/find-java.sh) $(LANES) spark -- -n 0 $(ARGS)

test-spark-cluster: $(VENV)/.spark-installed ## Kill executors, drivers and connections of bulk writes, in about 10 minutes
	@scripts/system-packages.sh redis postgresql java
	@JAVA_HOME=$$(scripts/find-java.sh) $(LANES) spark-cluster -- -n 0 -o faulthandler_timeout=1200 $(ARGS)

test-spark-versions: install ## Run a few Spark tests on each supported minor version of PySpark; ARGS="4.1"
	@scripts/system-packages.sh redis java
	@JAVA_HOME=$$(scripts/find-java.sh) scripts/test-spark-versions.sh $(ARGS)

test-compat: install ## Run the tests on other versions of Python, Django and the dependencies
	@scripts/system-packages.sh redis gettext
	@scripts/test-compat.sh $(VENV) $(XDIST) $(ARGS)

lint: install ## Check style, types and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: install ## Put the code in shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

mutants: install ## Break twenty rules of the engine and of Redis's scripts: the state machine must find each of them
	@scripts/system-packages.sh redis
	$(BIN)/python -m tools.mutants $(ARGS)

chaos: install ## Kill 10,000 random processes on each storage; ARGS="--signal TERM --kills 100" stops them
	@scripts/system-packages.sh redis postgresql
	$(BIN)/python -m tools.chaos $(ARGS)

soak: install ## Run mixed load with faults for an hour on each storage; ARGS="--storage redis --minutes 10"
	@scripts/system-packages.sh redis postgresql
	$(BIN)/python -m tools.soak $(ARGS)

conformance: $(VENV)-conformance/.installed ## Run the suites of Django, kombu and Celery, and write their table; ARGS="kombu"
	@scripts/system-packages.sh redis postgresql
	$(BIN)/python -m tools.conformance $(ARGS)

bench: install ## Measure speed and size; ARGS="--as-user", ARGS="--peers" or ARGS="--storage memory"
	$(BIN)/python -m tools.benchmarks $(ARGS)

demo: $(VENV)/.demo-installed ## Start the demo project, admin/admin; ARGS="--storage postgres|redis|scheduler"
	@scripts/system-packages.sh $(DEMO_SERVER)
	@$(if $(DEMO_SERVER),scripts/make-venv.sh $(VENV) -e '.[redis]' 'psycopg[binary]>=3.2')
	$(BIN)/python -m demo_project.demo $(ARGS)

demo-check: $(VENV)/.demo-installed ## Run the demo without a browser; it ends by itself; ARGS as for demo
	@scripts/system-packages.sh $(DEMO_SERVER)
	@$(if $(DEMO_SERVER),scripts/make-venv.sh $(VENV) -e '.[redis]' 'psycopg[binary]>=3.2')
	$(BIN)/python -m demo_project.demo --check $(ARGS)

demo-spark: $(VENV)/.spark-installed ## Run the demo's claims through Spark; it ends by itself; ARGS="--month 1 --serve"
	@scripts/system-packages.sh redis java
	@JAVA_HOME=$$(scripts/find-java.sh) $(BIN)/python -m demo_project.spark $(ARGS)

messages: install ## Bring the translations up to date and list what is missing; ARGS=fr begins French
	@scripts/system-packages.sh gettext
	$(BIN)/python -m tools.messages $(ARGS)

screenshots: install ## Make the pictures of the docs anew from the running demo, in about 6 minutes
	@scripts/system-packages.sh chromium
	$(BIN)/python -m pytest -p tests.conftest -n 0 -s -o faulthandler_timeout=0 tools/screenshots $(ARGS)

docs: $(VENV)/.docs-installed ## Build the documentation into docs/_build
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

wheel: install ## Build the sdist and the wheel into dist
	$(BIN)/python -m build --no-isolation

clean: ## Remove all that these targets made
	rm -rf .cache .venv .venv-conformance .venv-django5 .venv-django6 .venv-django60 .venv-oldest .venv-spark-* build dist docs/_build htmlcov demo_project/var
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	rm -f djqueue/templates djqueue/static
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environments: made again only when what they are made from has changed.

$(VENV)/.installed: pyproject.toml hatch_build.py demo_project/requirements.txt
	@scripts/system-packages.sh python
	@scripts/make-venv.sh $(VENV) -e '.[test,dev,docs]'
	@scripts/make-venv.sh $(VENV) --no-deps -r demo_project/requirements.txt
	@touch $@ $(VENV)/.demo-installed

$(VENV)/.demo-installed: pyproject.toml hatch_build.py demo_project/requirements.txt
	@scripts/system-packages.sh python
	@scripts/make-venv.sh $(VENV) -e .
	@scripts/make-venv.sh $(VENV) --no-deps -r demo_project/requirements.txt
	@touch $@

$(VENV)/.spark-installed: $(VENV)/.installed
	@scripts/make-venv.sh $(VENV) -e '.[spark]' 'pyspark[connect]'
	@touch $@

# With the versions of everything that the first environment has, too.
$(VENV)-conformance/.installed: $(VENV)/.installed tools/conformance/requirements.txt
	@$(BIN)/python -m pip freeze --exclude-editable >$(VENV)/.versions
	@scripts/make-venv.sh $(VENV)-conformance -c $(VENV)/.versions -e '.[celery,redis]' -r tools/conformance/requirements.txt
	@touch $@

$(VENV)/.docs-installed: pyproject.toml
	@scripts/system-packages.sh python
	@scripts/make-venv.sh $(VENV) -e '.[docs]'
	@touch $@
