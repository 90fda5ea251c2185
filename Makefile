# make demo: the main job on a real model.  make test: the tests.  make test-thorough: the same in
# all crosses of their cases, and what watches libraries, benches and the browser.  make test-docs:
# what the documentation shows.  make docs: the site.  make check: the quick gate.
# Both make their environment (.venv) first; nothing needs to be installed by hand.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
TESTS := .venv/installed-for-tests

export HF_HUB_OFFLINE := 1
# What is imported is compiled once, not by each process that a test starts.
unexport PYTHONDONTWRITEBYTECODE
export TOKENIZERS_PARALLELISM := false

.PHONY: demo docs test test-torch test-newest test-oldest smoke test-thorough test-docs check check-style bench clean

demo: $(STAMP)
	$(BIN)/python examples/embeddings.py

test: $(TESTS)
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not docs and not thorough"

# The same tests with other versions, each in an environment of its own. Torch takes some 5 GB there.
#   make test-torch TORCH=2.11.0: another torch, the rest as in constraints.txt
#   make test-newest: the newest release of everything
#   make test-oldest: every lower bound of pyproject.toml (pip has no such mode, uv has)
#   make smoke: the engines' main tests with the newest of everything but torch
OTHER_TESTS = bin/python -m pytest -q -n auto --dist worksteal -m "not docs and not thorough"
SMOKE = $(addprefix tests/,backends/onnxrt/test_onnxrt.py backends/onnxrt/test_onnxrt_memory.py \
	backends/openvino/test_openvino.py backends/test_inductor.py chain/test_selftest.py cli/test_doctor.py)

test-torch: OTHER = .venv-torch-$(TORCH)
test-torch:
	$(PYTHON) -m venv $(OTHER)
	grep -v '^torch==\|^triton==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet torch==$(TORCH)
	$(OTHER)/bin/python -m pip install --quiet -c $(OTHER)/constraints.txt -e '.[dev,quantized]'
	$(OTHER)/$(OTHER_TESTS)

test-newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager -e '.[dev,quantized]'
	.venv-newest/$(OTHER_TESTS)

test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet uv
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python \
		--resolution lowest-direct -e '.[dev,quantized]'
	.venv-oldest/$(OTHER_TESTS)

smoke:
	$(PYTHON) -m venv .venv-smoke
	grep '^torch==' constraints.txt > .venv-smoke/constraints.txt
	.venv-smoke/bin/python -m pip install --quiet --no-compile -c .venv-smoke/constraints.txt torch
	.venv-smoke/bin/python -m pip install --quiet --no-compile -c .venv-smoke/constraints.txt \
		-e '.[test]'
	.venv-smoke/$(OTHER_TESTS) $(SMOKE)

test-thorough: $(TESTS)
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m thorough

test-docs: $(TESTS)
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m docs

# The site: build/docs/index.html. A link that leads nowhere is an error.
docs: $(STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

check-style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: check-style $(TESTS)
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow and not docs and not thorough"

bench: $(STAMP)
	$(BIN)/python bench/overhead.py --json bench/results/overhead.json
	$(BIN)/python bench/overhead.py --guard --json bench/results/guard.json
	$(BIN)/python bench/telemetry.py --json bench/results/telemetry.json
	$(BIN)/python bench/faults.py --json bench/results/faults.json
	$(BIN)/python bench/soak.py --json bench/results/soak.json
	-$(BIN)/python bench/models.py --json bench/results/models.json
	-$(BIN)/python bench/models.py --train --json bench/results/training.json
	$(BIN)/python bench/scaling.py --json bench/results/scaling.json
	$(BIN)/python bench/warm.py --models bert,gpt2,resnet --json bench/results/warm.json
	$(BIN)/python bench/choosing.py --load 0 --json bench/results/choosing.json
	$(BIN)/python bench/guards.py --json bench/results/guards.json
	$(BIN)/python bench/guards.py --engine openvino --json bench/results/guards_openvino.json
	$(BIN)/python bench/generation.py --json bench/results/generation.json
	$(BIN)/python bench/onnxrt.py --json bench/results/onnxrt.json
	$(BIN)/python bench/onnxrt.py --parts halves --json bench/results/halves.json
	-$(BIN)/python bench/tensorrt_plans.py --json bench/results/tensorrt.json
	$(BIN)/python bench/passes.py --json bench/results/passes.json
	$(BIN)/python bench/pass_costs.py --json bench/results/pass_costs.json
	-$(BIN)/python bench/ops.py --json bench/results/ops.json
	-$(BIN)/python bench/edges.py --json bench/results/edges.json
	$(BIN)/python bench/tables.py
	$(BIN)/python bench/plots.py

clean:
	rm -rf .venv build dist *.egg-info

# The constraints pin torch: left to its range, pip takes the newest build and its CUDA packages.
# Bytecode is made of what is imported, when it is; of all of it, it takes pip a minute.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $@

# The demo goes without torchao, which prints warnings wherever transformers is imported.
$(TESTS): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev,quantized]'
	touch $@
