# make demo | test | test-gpu | docs | bench | clean.   Everything is installed into .venv, on the first call that needs it.
#
# Each extra has a stamp in .venv, written last. `.venv/installing` exists while .venv is being filled: a run that finds it
# comes after one that was cut off, and starts anew, since a half-copied package can look like a whole one to pip.

PYTHON ?= python3
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin/python
HAS = $(wildcard $(VENV)/ready-*)
export PYTHONPATH := $(CURDIR)
export PYTHONUNBUFFERED := 1
unexport PYTHONDONTWRITEBYTECODE  # the tests start hundreds of processes: each would compile the packages anew

.PHONY: help demo test test-gpu docs bench clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@sed -n 1p Makefile

demo: $(VENV)/ready-examples
	$(BIN) examples/digits.py

# Files of tests side by side, each in one process and in order: much of a test's time is waiting for the ranks that it started.
test: $(VENV)/ready-dev
	$(BIN) -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

# With PYTHON's own packages where it has them all (a machine with GPUs often has its torch, and no way to another), else in .venv.
NEEDED := import cloudpickle, pytest, sklearn, tensorboard, torch, torchmetrics, tqdm, yaml
test-gpu:
	@if $(PYTHON) -c '$(NEEDED)' 2>/dev/null; then set -x; $(PYTHON) -m pytest -m gpu $(ARGS); \
	else $(MAKE) --no-print-directory $(VENV)/ready-dev && $(BIN) -m pytest -m gpu $(ARGS); fi

docs: $(VENV)/ready-docs
	$(BIN) -m sphinx -W --keep-going -b html docs docs/_build
	@echo "docs/_build/index.html"

bench: $(VENV)/ready-bench
	$(BIN) benchmarks/overhead.py
	$(BIN) benchmarks/startup.py

$(VENV)/ready-%: setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "Python 3.10 or newer is needed; '$(PYTHON)' is not. Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@if [ -e $(VENV)/installing ] || { [ -e $(VENV) ] && ! $(BIN) -c '' 2>/dev/null; }; then \
		echo "The set-up of .venv was cut off; making it anew."; rm -rf $(VENV); fi
	@mkdir -p $(VENV) && touch $(VENV)/installing
	@$(BIN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { rm -f $(VENV)/installing; \
		echo "'$(PYTHON) -m venv' failed. It needs the modules venv and ensurepip; on Debian and Ubuntu:" \
			"apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing into .venv$(if $(HAS),, (several gigabytes, most of it torch; only this once)) ..."
	@trap 'exit 130' INT TERM; $(BIN) -m pip install $(if $(HAS),--quiet) --disable-pip-version-check --editable '.[$*]' || { \
		rm -f $(VENV)/installing; echo "pip could not install what setup.cfg lists; see above. Then run make again." >&2; exit 1; }
	@rm $(VENV)/installing && touch $@

clean: # what the commands above wrote, but for .venv
	rm -rf build dist *.egg-info runs csv_logs checkpoints docs/_build .pytest_cache
	find . -path ./.venv -prune -o -name __pycache__ -prune -exec rm -rf {} +
