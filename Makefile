# `make demo` and `make test` need nothing but make and Python >= 3.10: everything else goes into .venv.

VENV := .venv
RUN := $(VENV)/bin/

# The newest Python that really runs: version managers leave commands in PATH that only print an error.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3.10 python3; do \
	"$$python" -c '' >/dev/null 2>&1 && { echo "$$python"; break; }; done)

# A user-wide `user = true` in pip's configuration makes every installation into a virtual environment fail.
export PIP_USER := 0

.PHONY: help demo test lint bench clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train a digits classifier with two workers on this machine"
	@echo "make test    run the tests; options for pytest: make test ARGS='-k ports -x'"
	@echo "make lint    check style and formatting"
	@echo "make bench   measure data-parallel training; options: make bench ARGS='...'"
	@echo "make clean   remove .venv, caches and logs"
	@echo "PYTHON=/path/to/python3 chooses the Python that .venv is made with."

demo: $(VENV)/.examples
	$(RUN)tfdist run -n 2 examples/train_digits.py $(ARGS)

# What trains in one process runs on two cores; what starts processes, or counts seconds, has the machine to itself.
# With ARGS that select tests, one of the two may find none (code 5).
test: $(VENV)/.test
	$(RUN)python -m pytest -n 2 --dist loadfile tests/logical tests/memory $(ARGS) || test $$? -eq 5
	$(RUN)python -m pytest tests/unit tests/compat tests/launcher tests/testing tests/fault_tolerance tests/cluster \
		tests/parameter_server $(ARGS) || test $$? -eq 5

lint: $(VENV)/.test
	$(RUN)ruff check .
	$(RUN)ruff format --check .

bench: $(VENV)/.bench
	$(RUN)python -m benchmarks.data_parallel $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache tfdist-logs *.backup
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "make: no Python found. Install Python 3.10 or newer (package python3)," \
		"or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: $(PYTHON) is" \
		"`"$(PYTHON)" --version 2>&1`, but tfdist needs Python 3.10 or newer." \
		"Install one, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	"$(PYTHON)" tools/bootstrap_venv.py $(VENV)
	@touch $@

# One stamp for each extra: a second `make` installs nothing, a change of the requirements installs anew.
$(VENV)/.examples $(VENV)/.test $(VENV)/.bench: $(VENV)/.%: $(VENV)/.made pyproject.toml setup.py
	$(RUN)python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	@touch $@
