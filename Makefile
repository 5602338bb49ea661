# `make demo` and `make test` need nothing but make and Python >= 3.10: everything else goes into .venv.

VENV := .venv
RUN := $(VENV)/bin/

# The newest Python that really runs: version managers leave commands in PATH that only print an error.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3.10 python3; do \
	"$$python" -c '' >/dev/null 2>&1 && { echo "$$python"; break; }; done)

# A user-wide `user = true` in pip's configuration makes every installation into a virtual environment fail.
export PIP_USER := 0

# Where this is set, every process that starts would compile the tests and tfdist again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test nightly test-rest test-timing test-horovod test-matrix test-slurm test-gpu conformance soak \
	durations constraints commands mutations lint bench docs package horovod clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train a digits classifier with two workers on this machine"
	@echo "make test    run the tests, 15 to 20 minutes on two cores; options for pytest: make test ARGS='-k ports -x'"
	@echo "make nightly everything else, in parts, 2 to 3 hours: PARTS='mutations soak' runs these"
	@echo "make test-matrix the tests with other versions of TensorFlow and Keras, each in its own environment"
	@echo "make test-slurm those on a real Slurm, MPI and networks, which it installs as root on Debian"
	@echo "make test-gpu those on a GPU, cut into two logical ones; ARGS=--stand-in tries them on CPU devices"
	@echo "make conformance Keras' own tests in the scope of the strategies, 15 minutes: what became worse or better"
	@echo "make soak    disturb a training on two workers for an hour, and compare its end; make soak SECONDS=600 SEED=1"
	@echo "make durations all tests of pytest, and note in tests/durations.tsv how long everything takes"
	@echo "make constraints hold the installed versions for .ci/run"
	@echo "make commands run what README, CONTRIBUTING and this help name, each for a moment"
	@echo "make mutations make mistakes on purpose in a copy, and see that tests fail"
	@echo "make lint    check style, formatting and what imports what"
	@echo "make bench   measure data-parallel training; options: make bench ARGS='...'"
	@echo "make docs    build the documentation into site/"
	@echo "make package build the wheel and the source distribution into dist/, and check them"
	@echo "make horovod build Horovod for the installed TensorFlow, some minutes; without it, its tests are skipped"
	@echo "make clean   remove .venv, caches and logs"
	@echo "PYTHON=/path/to/python3 chooses the Python that .venv is made with."

demo: $(VENV)/.examples
	$(RUN)tfdist run -n 2 examples/train_digits.py $(ARGS)

# So many files run at a time, on two cores: tests that wait leave them idle. With more cores: make test WORKERS=6.
WORKERS ?= 3
# Given a Python and the name of a report. What fails runs once more, alone. Files are handed out in the order of
# tests/conftest.py.
pytest = "$(1)" tools/run_tests.py $(2) -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# All but those on real clusters and GPUs.
TESTS := tests --ignore=tests/system --ignore=tests/gpu

test: $(VENV)/.test
	$(call pytest,$(RUN)python,test) $(TESTS) $(ARGS)

# All that the gate leaves out, in parts, none of which stops another: a table at the end.
nightly: $(VENV)/.test
	$(RUN)python tools/nightly.py $(PARTS)

# What `make test` leaves out.
test-rest: $(VENV)/.test
	$(call pytest,$(RUN)python,rest) $(TESTS) --ignore=tests/horovod -m "nightly and not timing" $(ARGS)

# Tests of seconds, shares of time and races: alone, and the best of three counts.
test-timing: $(VENV)/.test
	$(RUN)python tools/run_tests.py timing --tries 3 $(TESTS) -m timing $(ARGS)

# After `make horovod`.
test-horovod: $(VENV)/.test
	$(call pytest,$(RUN)python,horovod) tests/horovod -m "not timing" $(ARGS)

durations: test test-rest
	$(RUN)python tools/test_times.py --write $(REPORTS)/test.xml $(REPORTS)/rest.xml

# Keras' tests import what few users of TensorFlow have, jax and torch: only here.
conformance: $(VENV)/.test $(VENV)/.conformance
	$(RUN)python tools/conformance.py $(ARGS)
	$(RUN)python -m pytest -m "" -k "orbax" tests/fault_tolerance tests/launcher/test_documentation_programs.py

# Some 200 faults in an hour. Without SEED, each time others.
SECONDS ?= 3600

soak: $(VENV)/.test
	$(RUN)python -m tests.soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

commands: $(VENV)/.test
	$(RUN)python tools/try_commands.py $(ARGS)

mutations: $(VENV)/.test
	$(RUN)python tools/mutation_check.py $(ARGS)

# The newest and the previous TensorFlow with the newest and the previous Keras, each in an environment of its own. What
# Keras will be next: make test-matrix MATRIX=2.21-nightly.
MATRIX ?= 2.21-3.15 2.21-3.14 2.20-3.15 2.20-3.14

test-matrix: $(MATRIX:%=$(VENV)-matrix/%/.tested)

.PRECIOUS: $(VENV)-matrix/%/.test
$(VENV)-matrix/%/.test: pyproject.toml setup.py
	"$(PYTHON)" tools/bootstrap_venv.py $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]' \
		"tensorflow==$(word 1,$(subst -, ,$*)).*" $(patsubst %,"keras==%.*",$(filter-out nightly,$(word 2,$(subst -, ,$*))))
	$(if $(filter %-nightly,$*),$(@D)/bin/python -m pip uninstall --quiet --yes keras)
	$(if $(filter %-nightly,$*),$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps keras-nightly)
	@touch $@

# Always run again.
$(VENV)-matrix/%/.tested: $(VENV)-matrix/%/.test .FORCE
	@echo "--- TensorFlow and Keras $*"
	$(call pytest,$(@D)/bin/python,$*) $(TESTS) -m "" $(ARGS)

.FORCE:

# What is not there is skipped, with its reason.
test-slurm: $(VENV)/.test
	sh tools/install_clusters.sh $(VENV)/mpich $(RUN)python
	$(RUN)python tools/run_tests.py system tests/system $(ARGS)

# In one process: the GPU is cut once.
test-gpu: $(VENV)/.test
	$(RUN)python tools/run_tests.py gpu tests/gpu $(ARGS)

# The versions that .ci/run installs: those that are installed now.
constraints: $(VENV)/.test $(VENV)/.docs $(VENV)/.package $(VENV)/.horovod-build
	$(RUN)python -c 'import sys; print("# Python %d.%d" % sys.version_info[:2])' > .ci/constraints.txt
	$(RUN)python -m pip freeze --disable-pip-version-check --exclude-editable >> .ci/constraints.txt

lint: $(VENV)/.test
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)lint-imports --no-cache

bench: $(VENV)/.bench
	$(RUN)python -m benchmarks.data_parallel $(ARGS)

# What the theme prints about its successors is no warning about a page.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN)mkdocs build --strict $(ARGS)

# What is uploaded. The wheel is built from the source distribution. Not python -m build: here, build is a folder.
package: $(VENV)/.package
	rm -rf dist
	$(RUN)pyproject-build --outdir dist .
	$(RUN)twine check --strict dist/*
	$(RUN)check-wheel-contents dist/*.whl

# A binary of it fits one version of TensorFlow: there is no extra that pip could install. What is built is kept.
horovod: $(VENV)/.test $(VENV)/.horovod-build
	wheel=$$($(RUN)tfdist horovod build) && \
		$(RUN)python -m pip install --quiet --disable-pip-version-check --force-reinstall "$$wheel"

clean:
	rm -rf $(VENV) $(VENV)-matrix build dist site *.egg-info .pytest_cache .ruff_cache tfdist-logs *.backup
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "make: no Python found. Install Python 3.10 or newer (package python3)," \
		"or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: $(PYTHON) is" \
		"`"$(PYTHON)" --version 2>&1`, but tfdist needs Python 3.10 or newer." \
		"Install one, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" tools/bootstrap_venv.py $(VENV)
	@touch $@

# One stamp for each extra: a second `make` installs nothing, a change of the requirements installs again.
$(VENV)/.examples $(VENV)/.test $(VENV)/.bench $(VENV)/.docs $(VENV)/.horovod-build $(VENV)/.conformance \
		$(VENV)/.package: $(VENV)/.%: $(VENV)/.made pyproject.toml setup.py
	@echo "Installing .[$*]: TensorFlow takes about 700 MB to download, 2.6 GB on disk; PyTorch, of bench, several GB more"
	@$(RUN)python -m pip install --disable-pip-version-check $(CONSTRAINTS:%=-c %) -e '.[$*]'
	@touch $@
