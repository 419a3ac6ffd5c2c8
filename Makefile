# `make compare` and `make test` do all the set-up themselves; they need Python 3.11 or newer, make and git.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CUDA_VENV := .venv-cuda
PYTHON_VENV := .venv-of-$(notdir $(PYTHON))
PYTHON_TESTS := tests/core tests/devices tests/platform tests/scheduler tests/compiler/tuning tests/executor/test_executor.py tests/executor/test_executor_inline.py tests/test_import.py \
	tests/cli/test_cli.py tests/cli/test_cli_memory.py tests/cli/test_cli_passes.py tests/cli/test_cli_train.py \
	tests/ops/elementwise/test_elementwise.py tests/ops/conv/test_conv.py tests/ops/onednn/test_conv.py tests/ops/control/test_queue.py tests/ops/storage/test_storage.py

# Tests start very many processes of Python, and rewrite four hundred files of asserts: what is compiled is kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: compare dist docs notebooks test test-browser test-ray test-wheel test-all test-matrix test-arm test-python stress lint proto benchmark benchmark-cnn benchmark-cnn-avx2 benchmark-models benchmark-onnx benchmark-cluster benchmark-serve benchmark-cuda fuzz fuzz-operators mutants cuda-check clean

compare: $(VENV)/.installed
	$(BIN)/dagexec compare zoo:googlenet

# A file of tests runs in one process; there are two of these, so that a machine with two cores is busy.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# All quick tests, and of the slow ones, the part that is this commit's turn; docs/testing.md says how. It prints which
# took longest: of those, what is not marked slow should be.
test: $(VENV)/.installed-test
	$(PYTEST) --part --durations 20 --durations-min 1

# Deployments on local Ray clusters; Ray is large, and nothing else needs it. Of a deployment of two replicas, and of
# one of four, so many are killed under load.
KILLS = 25
test-ray: $(VENV)/.installed-ray
	DAGEXEC_KILLS=$(KILLS) $(BIN)/python -m pytest --ray -m ray --durations 8 tests/cluster tests/test_examples.py

# Reports, the live page of a server and the site in Chromium, which is the system's; where there is none, and apt may
# be asked, that installs it. APPROVE=1 takes the pictures of docs/images.
test-browser: $(VENV)/.installed-browser docs
	@command -v chromium chromium-browser google-chrome > /dev/null || { apt-get update --quiet=2; apt-get install --quiet=2 --yes --no-install-recommends chromium; }
	APPROVE=$(APPROVE) $(BIN)/python -m pytest --browser -m browser --durations 3 tests/report tests/server/test_live_page.py tests/site

# The wheel in a fresh environment: make test-wheel PYTHON=python3.14
test-wheel: $(VENV)/.installed-test
	DAGEXEC_WHEEL_PYTHON=$(PYTHON) $(BIN)/python -m pytest tests/test_packaging.py -k wheel

test-all: $(VENV)/.installed-test
	$(PYTEST)

# Chosen tests under each instruction set that the processor has, and without oneDNN.
test-matrix: $(VENV)/.installed-test
	$(BIN)/python -m tests.matrix

# Chosen tests on 64-bit Arm: emulated by qemu where this machine is none, which apt installs if it may be asked.
test-arm: $(VENV)/.installed-test .arm/.installed
	$(BIN)/python -m tests.arm

.arm/.installed: tests/arm.py
	@test "$$(uname -m)" = aarch64 || command -v qemu-aarch64 > /dev/null || { apt-get update --quiet=2; apt-get install --quiet=2 --yes --no-install-recommends qemu-user binutils-aarch64-linux-gnu; }
	$(BIN)/python -m tests.arm --install
	touch $@

# What depends most on Python's own threads, loops and annotations, under another one: make test-python PYTHON=python3.14
test-python: $(PYTHON_VENV)/.installed
	$(PYTHON_VENV)/bin/python -m pytest -n 2 --dist loadfile $(PYTHON_TESTS)

# Random nets, callers and faults for a minute on each kind of device; `--case SEED` replays what fails.
STRESS = 60
stress: $(VENV)/.installed-test
	$(BIN)/dagexec stress --seconds $(STRESS) --device sim:0
	$(BIN)/dagexec stress --seconds $(STRESS) --device cpu

# The documentation as a site in build/site; every warning, a dead link too, is an error.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The source distribution and the wheel of this commit, in dist; docs/releasing.md
dist: $(VENV)/.installed-release
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# The notebooks of examples/ with the outputs of this code, which the site shows.
notebooks: $(VENV)/.installed-test
	$(BIN)/python docs/site/execute_notebooks.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --quiet --offline --no-progress .github/workflows

benchmark: $(VENV)/.installed-test
	$(BIN)/python benchmarks/scheduler_cost.py --json benchmarks/results/scheduler_cost.json
	$(BIN)/python benchmarks/import_time.py --json benchmarks/results/import_time.json
	$(BIN)/python benchmarks/hazard_check.py --json benchmarks/results/hazard_check.json
	$(BIN)/python benchmarks/state_space.py --json benchmarks/results/state_space.json
	$(BIN)/python benchmarks/mutations.py --json benchmarks/results/mutations.json
	$(BIN)/python benchmarks/planted.py --json benchmarks/results/planted.json
	$(BIN)/python benchmarks/inter_op.py --json benchmarks/results/inter_op.json
	$(BIN)/python benchmarks/null_comparison.py --json benchmarks/results/null_comparison.json
	$(BIN)/python benchmarks/concurrent_requests.py --json benchmarks/results/concurrent_requests.json
	$(BIN)/python benchmarks/event_loop.py --json benchmarks/results/event_loop.json
	$(BIN)/python benchmarks/what_if.py --json benchmarks/results/what_if.json
	$(BIN)/python benchmarks/simulated_streams.py --json benchmarks/results/simulated_streams.json
	$(BIN)/python benchmarks/literature.py --json benchmarks/results/literature.json
	$(BIN)/python benchmarks/conv.py --json benchmarks/results/conv.json
	$(BIN)/python benchmarks/conv_error.py --json benchmarks/results/conv_error.json
	$(BIN)/python benchmarks/shared_buffer.py --json benchmarks/results/shared_buffer.json
	$(BIN)/python benchmarks/tuning.py --json benchmarks/results/tuning.json
	$(BIN)/python benchmarks/tiny.py --json benchmarks/results/tiny.json
	$(BIN)/python benchmarks/walk.py
	$(BIN)/python benchmarks/cold_start.py --json benchmarks/results/cold_start.json
	$(BIN)/python benchmarks/compile_time.py --json benchmarks/results/compile_time.json
	$(BIN)/python benchmarks/plans.py --json benchmarks/results/plans.json
	$(BIN)/python benchmarks/train.py --json benchmarks/results/train.json
	$(BIN)/python benchmarks/data_parallel.py --json benchmarks/results/data_parallel.json

# Whole networks against onnxruntime and OpenVINO, in about an hour; PyTorch takes part where .venv has it.
benchmark-cnn: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/cnn.py --write-docs

# The same as on a processor with AVX2 and no AVX-512; docs/benchmarks.md has a part for each.
benchmark-cnn-avx2: $(VENV)/.installed-bench
	ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell $(BIN)/python benchmarks/cnn.py --write-docs --batch 1

# Forty models of six families, which are made first, in float32, on both kinds of processors: some three hours; and in
# bfloat16 and int8, where the processor computes in them. Ended and begun again, it goes on where it was.
MODELS = $(BIN)/python benchmarks/models.py
NARROW = ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell
benchmark-models: $(VENV)/.installed-bench-models
	$(MODELS) --make
	$(MODELS)
	$(NARROW) $(MODELS)
	$(MODELS) --batch 1 --threads 1 --torch --tuning 10
	$(MODELS) --batch 1 --threads 1 --precision bfloat16 int8
	$(MODELS) --first-results
	$(MODELS) --profile
	$(NARROW) $(MODELS) --profile --write-docs

# Deployments on a local Ray cluster of this machine; docs/cluster.md
benchmark-cluster: $(VENV)/.installed-ray
	$(BIN)/python benchmarks/cluster.py --json benchmarks/results/cluster.json

# The server over HTTP on loopback, beside onnxruntime behind Starlette; docs/benchmarks.md
benchmark-serve: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/serve.py --json benchmarks/results/serve.json

# Files of exporters and packages, which are made first, in half an hour; docs/onnx-models.md
benchmark-onnx: $(VENV)/.installed-bench-models
	$(BIN)/python benchmarks/onnx_models.py --make
	$(BIN)/python benchmarks/onnx_models.py --write-docs
	$(BIN)/python benchmarks/onnx_load.py
	$(BIN)/python benchmarks/tabular.py --json benchmarks/results/tabular.json

# Whole networks on the GPU, beside PyTorch where .venv has it; without a GPU it says so and measures nothing.
benchmark-cuda: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/cuda_networks.py --json benchmarks/results/cuda.json

# Damaged files of every format, in processes with limits; `python -m tests.fuzz --case N` does one again. Which cases
# they are follows from the commit, so that one commit after another does others. docs/testing.md
CASES = 2000
fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz --cases $(CASES)

# The operators on drawn geometries, twenty times as many as in `make test`, in memory beside which nothing may be
# touched: a worker that does so ends, and another goes on.
fuzz-operators: $(VENV)/.installed-test
	DAGEXEC_DRAWS=20 DAGEXEC_GUARDED=1 $(BIN)/python -m pytest -n 2 --max-worker-restart 20 -o faulthandler_timeout=3600 tests/ops

# Small mistakes in scheduler, numerics and storage, one after another: tests must see each. Some 15 minutes.
mutants: $(VENV)/.installed-test
	$(BIN)/python -m tests.mutants --json benchmarks/results/mutants.json

# The CUDA code against the real CuPy, NVRTC and cuDNN, in an environment of its own; a device is not needed.
cuda-check: $(CUDA_VENV)/.installed
	$(CUDA_VENV)/bin/python -m pytest tests/cuda/test_conformance.py tests/cuda/test_nvrtc.py tests/cuda/test_cudnn_deviceless.py
	$(CUDA_VENV)/bin/python -m tests.cuda.check_kernels --every 5

proto: $(VENV)/.installed-dev
	cd dagexec/core/proto && ../../../$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. dagexec.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. dagexec/server/proto/inference.proto

# What cffi makes of the declarations of oneDNN's functions.
cffi: $(VENV)/.installed-dev
	$(BIN)/python -m tests.ops.onednn.declarations

clean:
	rm -rf $(VENV) $(CUDA_VENV) .venv-of-* dist build

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Modules are compiled when they are first imported, as most never are.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) -e '.[onednn,plot,examples,mpi]'
	touch $@

# What .ci/run needs, at once.
$(VENV)/.installed-ci: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) -e '.[dev,ray,browser,docs]'
	touch $(addprefix $(VENV)/.installed-,test dev ray browser docs ci)

$(VENV)/.installed-browser $(VENV)/.installed-docs $(VENV)/.installed-ray: $(VENV)/.installed-test
$(VENV)/.installed-%: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) -e '.[$*]'
	touch $@

$(CUDA_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,cuda12]'
	touch $@

$(PYTHON_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(PYTHON_VENV)
	$(PYTHON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@
