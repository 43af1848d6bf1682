# make lab          set everything up in .venv and open JupyterLab on the first lab; ARGS=--app: the explorer alone
# make test         everything that needs no GPU, in two processes (tests on the GPU: see CONTRIBUTING.md)
# make hub          JupyterHub for a class: ARGS=names.txt, a file with one name a line
# make doctor | progress | run | diagnose | decide | record | report | export | compare | build | guide      the other commands of labkit
# ARGS="..." goes on to the command: make lab ARGS=--no-browser, make run ARGS=10
# PYTHON=... names the Python to start from (3.11 or newer)

PYTHON ?= python3
ARGS ?=
IN_TWO = --numprocesses=2 --dist loadfile --no-loadscope-reorder
LABKIT = .venv/bin/python -m labkit

.PHONY: lab test hub doctor progress run diagnose decide record report export compare build guide install

install:
	@$(PYTHON) -m labkit.install

lab doctor progress run diagnose decide record report export compare build guide: install
	@$(LABKIT) $@ $(ARGS)

hub:
	@$(PYTHON) -m labkit.install --extra hub
	@$(LABKIT) hub $(ARGS)

test:
	@$(PYTHON) -m labkit.install --extra test
	@.venv/bin/python -m pytest `.venv/bin/python -c "import xdist" 2>/dev/null && echo $(IN_TWO)` $(ARGS)
