# Everything sets itself up: `make demo` and `make test` work on a fresh machine with Python 3.10 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MCORE_NEW := 0.19.2
STAMP := $(VENV)/.ready-$(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)

.PHONY: help check test demo bench soak clean

help:
	@echo "make demo   convert a tiny model to Megatron and back, and show that every byte is equal"
	@echo "make test   install what the tests need and run them"
	@echo "make check  ruff, mypy --strict, import-linter"
	@echo "make bench  ratios to cp and to the peers, with peak memory"
	@echo "make soak   the long fuzzing and kill tests"

# torch from the constraints file is the CPU build where one is offered; megatron-core 0.19 lies apart, for the tests that run it in a process of its own
$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0 editables
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	$(BIN)/pip install --quiet --no-deps triton==3.9.0 || echo "no triton here: its kernels are not tested"
	test -d $(VENV)/mcore019/megatron || $(BIN)/pip install --quiet --ignore-requires-python --no-deps --target $(VENV)/mcore019 megatron-core==$(MCORE_NEW)
	rm -f $(VENV)/.ready-*
	touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(STAMP)
	$(BIN)/pytest -n 2 --dist loadgroup $(TESTS)

bench: $(STAMP)
	$(BIN)/pytest tests/bench -s --benchmark-only

soak: $(STAMP)
	CKPT_SOAK=1 $(BIN)/pytest -n 2 tests/cases tests/hostile

demo:
	@sh fixtures/demo.sh

clean:
	rm -rf $(VENV) .venv-demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache .benchmarks
