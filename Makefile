# The course's commands. `make help` lists them.
SHELL := /bin/bash
# Of these two the first that was compiled with optimizations, as a distribution's is. pyenv's is not
# by default, and all that Python does takes a quarter longer.
QUICK := import ensurepip, sys, sysconfig; quick = sys.base_prefix == "/usr" or \
  "--enable-optimizations" in sysconfig.get_config_var("CONFIG_ARGS"); \
  sys.exit(not quick or sys.version_info < (3, 11))
PYTHON ?= $(shell for each in python3 /usr/bin/python3; do \
  $$each -c '$(QUICK)' 2>/dev/null && echo $$each && exit; done; echo python3)
VENV ?= .venv
BIN := $(VENV)/bin
# Test processes: one more than a small machine has cores, for Slurm and browsers mostly wait.
PARALLEL ?= 3
STEP ?= 03
# JupyterLab's terminal finds `dlojz` by PATH, which a login shell would set anew.
TERMINAL := --ServerApp.terminado_settings='{"shell_command": ["bash"]}'
# JupyterLab refuses root, who is the only user of most containers.
ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

# A hub for trials: one_machine or slurm_cluster, in a folder that every user may read.
HUB ?= one_machine
HUB_FOLDER ?= $(if $(filter 0,$(shell id -u)),/opt/dlojz,$(HOME)/.local/share/dlojz)

.PHONY: help setup system demo test test-latest quick lab book talks hub lint slurm slurm-stop bench bench-gpu bench-loader verify record clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */|/' | column -t -s '|'

setup: $(VENV)/.ready  ## make the virtual environment, with the versions that were tested

# uv installs in parallel and compiles once: minutes less than pip for a set with torch in it.
# Twice --quiet leaves pip's errors: its warnings are of a site's configuration, and no concern here.
$(VENV)/.ready: pyproject.toml constraints.txt tools/overrides.json tools/page_config.json
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed, $$($(PYTHON) --version) was found: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "No venv: apt-get install python3-venv, then again"; exit 2; }
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode -c constraints.txt -e '.[dev]'
	@install -D -m 644 tools/overrides.json $(VENV)/share/jupyter/lab/settings/overrides.json  # no news pop-up
	@install -m 644 tools/page_config.json $(VENV)/share/jupyter/lab/settings/  # no Node.js for each page
	@touch $@

demo: setup  ## the course in a few minutes: images, a gain on this machine, two jobs, a verdict
	$(BIN)/python tools/demo.py

# Where no bytecode is written, hundreds of processes would each compile the package.
test:  ## all tests: unit, solutions, notebooks, browser
	@$(MAKE) --no-print-directory -j2 system setup
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(PARALLEL) --dist=loadfile --no-loadscope-reorder --durations=15 \
	  --nbval-lax --nbval-current-env --nbval-cell-timeout=240 tests notebooks solutions

quick: setup  ## the tests of what was changed, in less than a minute
	@$(BIN)/python tools/quick.py

# What torch may change: the tests that run it or a trainer, and all notebooks. Not what needs Slurm, a
# hub, a browser or an installation. `make test-latest LATEST=tests/test_private.py` runs one of them.
LATEST ?= $(filter-out $(patsubst %,tests/test_%.py,allocation browser course english hub install slurm), \
  $(shell grep -lE "torch|solution|experiment_file" tests/test_*.py)) notebooks solutions

test-latest:  ## tests of trainer, checks and notebooks on the newest torch, in .venv-latest
	@test -x .venv-latest/bin/pip || $(PYTHON) -m venv .venv-latest
	.venv-latest/bin/pip install --quiet --quiet --disable-pip-version-check --upgrade uv
	.venv-latest/bin/uv pip install --quiet --python .venv-latest/bin/python --compile-bytecode --upgrade -e '.[dev]'
	@.venv-latest/bin/uv pip list --python .venv-latest/bin/python 2>/dev/null | grep -E "^(torch[a-z]*|triton|numpy|pytest|jupyterlab) "
	PYTHONDONTWRITEBYTECODE= .venv-latest/bin/pytest -n $(PARALLEL) --dist=loadfile --no-loadscope-reorder \
	  --nbval-lax --nbval-current-env --nbval-cell-timeout=240 $(LATEST)

lab: setup  ## open JupyterLab on the notebooks
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/jupyter lab $(ROOT) $(TERMINAL) --notebook-dir=. --LabApp.default_url=/lab/tree/notebooks/00_start.ipynb

book: setup  ## the course as a site, to read or to publish: book/README.md
	@$(BIN)/python tools/book.py build

hub:  ## try the course on a JupyterHub of your own, on loopback; or HUB=slurm_cluster
	jupyterhub/install.sh $(HUB_FOLDER)
	HUB_LOGIN=trial HUB_BRANCH=$${HUB_BRANCH:-$$(git branch --show-current)} jupyterhub/start.sh $(HUB_FOLDER) $(HUB)

system:
	@PYTHON=$(PYTHON) tools/system.sh

lint: setup  ## ruff, and the derived files
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tools/steps.py check
	$(BIN)/python tools/notebooks.py check

slurm:  ## start a throw-away Slurm on this machine, to rehearse on (root, Debian or Ubuntu)
	PYTHON=$(PYTHON) tools/system.sh
	SLURM_FIXTURE_CPUS=8 slurm/throwaway.sh start
	@echo "To use it: eval \"\$$(slurm/throwaway.sh env)\"    To end it: make slurm-stop"

slurm-stop:  ## end it
	slurm/throwaway.sh stop

bench: setup  ## what the course's own tools cost
	$(BIN)/python tools/bench.py

bench-gpu: setup  ## our step beside timm's, on a GPU
	$(BIN)/python tools/bench_gpu.py

bench-loader: setup  ## what a core decodes, beside PIL and DALI; nvJPEG on a GPU
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[loading]'
	$(BIN)/python tools/bench_loader.py

talks: setup  ## the slides of the talks; PDF=1 prints them, CLASS=FOLDER shows your class
	@$(BIN)/python tools/talks.py $(if $(PDF),--pdf) $(if $(CLASS),--class '$(CLASS)')

verify: setup  ## many verdicts: solutions must pass, wrong answers must not; MINUTES=9 stops, again goes on
	$(BIN)/python tools/verify.py $(if $(MINUTES),--minutes $(MINUTES))

record: setup  ## make recorded runs again, on a GPU: make record STEP=03 INTO=reference/h100
	$(BIN)/python tools/record.py $(STEP) $(INTO)

clean:  ## remove the environment and caches; runs, data and saved files stay
	rm -rf $(VENV) .venv-latest build book/_build *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
