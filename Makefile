PYTHON ?= python3
TRITON = triton==3.6.0; sys_platform == "linux"
TOO_OLD = error: Python 3.11 or newer is needed: $(PYTHON) is $$($(PYTHON) -V 2>/dev/null || echo missing); name another with make PYTHON=...

help:
	@echo "make train   train FLASH on a book that ships here, in about five minutes"
	@echo "make test    run the tests; PYTEST_ARGS='tests/test_config.py -k toml' picks some"
	@echo "make test-all  the rest of the tests: rarer combinations of options, further kernel cases"
	@echo "make lint    ruff"
	@echo "make types   mypy"
	@echo "make bench   training steps on this CPU beside other models, in half an hour; make bench-all: the rest"
	@echo "make gpu     on a GPU: kernels, training steps and decoding are timed; STAGE=gpu-step picks some; OUT=out/gpu, resumable"
	@echo "make drills  processes and ranks killed, files damaged, odd command lines: an hour of one core, resumable; DRILLS='kills=100'"
	@echo "make campaign  tests that are too long for a push: a compiled run against an eager one, all cases of the slow kernels"
	@echo "make docs    the documentation as a site, in out/docs/site; every link is checked"
	@echo "make wheel   build the source archive and the wheel, install it where nothing else is, and try it; in out/wheel"
	@echo "make lowest  the tests with the oldest versions that are allowed, in an environment of its own"
	@echo "make ecosystem  fine-tuning, quantisation and evaluation by other libraries, each in an environment of its own"
	@echo "make env     make .venv, which the others do when it is missing or out of date"
	@echo "make clean   remove environments and caches, not what was trained (out/)"

train: .venv/installed
	.venv/bin/lineartime prepare --sample --out out/jane-eyre/data --vocab-size 1024 --held-out 0.1
	.venv/bin/lineartime train examples/jane_eyre.toml

# A file is one process's: what its tests share, such as a launch of four ranks, is made once. In their order: else the
# files of few and long tests come last, when one process has nothing left. A process that dies ends the run: its test
# would hang again in the next one.
TWO_PROCESSES = -n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

test: .venv/installed
	.venv/bin/python -m pytest $(TWO_PROCESSES) $(PYTEST_ARGS)

test-all: .venv/installed
	.venv/bin/python -m pytest $(TWO_PROCESSES) -m rest $(PYTEST_ARGS)

lint: .venv/installed
	.venv/bin/ruff check

types: .venv/installed
	.venv/bin/mypy

# Rows are added as they come; a run that was cut off goes on.
bench bench-all: .venv/installed
	.venv/bin/python -m benchmarks run $@ --json $(or $(ROWS),out/bench.jsonl) $(BENCH_ARGS)

# An environment of its own: the site's builder reads the sources and does not import them, so torch need not be there.
docs: .venv-docs/installed
	.venv-docs/bin/python docs/site.py pages out/docs/pages
	PATH=$(CURDIR)/.venv-docs/bin:$$PATH .venv-docs/bin/zensical build --clean --strict
	.venv-docs/bin/python docs/site.py check out/docs/site

.venv-docs/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "$(TOO_OLD)" >&2; exit 1; }
	@if [ -e $@ ]; then rm $@; else $(PYTHON) -m venv --clear .venv-docs; fi
	.venv-docs/bin/python -m pip install --disable-pip-version-check --no-input -c constraints.txt \
		$$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

# Trials are added to the log in out/drills as they come; drills that were cut off go on.
drills: .venv/installed
	PYTHONPATH=$(CURDIR):tests:tests/helpers nice .venv/bin/python -m drills \
		$(or $(DRILLS),kills=300 corruptions=1100 commands=1000 ranks=60) --rows tests/drills/rows.jsonl $(DRILLS_ARGS)

campaign: .venv/installed
	.venv/bin/python -m pytest -m campaign $(PYTEST_ARGS)

# No environment is made: it takes the packages that $(PYTHON) has. STAGE is one of the lists of benchmarks/cells.toml, or
# several.
gpu:
	$(PYTHON) -m benchmarks run $(or $(STAGE),gpu-kernels gpu-step gpu-decode) \
		--device cuda --json $(or $(OUT),out/gpu)/rows.jsonl $(GPU_ARGS)

env: .venv/installed

# The stamp is there only while the environment is whole. Without it an install was cut off, or there was none: start over.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "$(TOO_OLD)" >&2; exit 1; }
	@if [ -e $@ ]; then rm $@; else $(PYTHON) -m venv --clear .venv; fi
	.venv/bin/python -m pip install --disable-pip-version-check --no-input -c constraints.txt -e '.[dev,peers,report]'
	@.venv/bin/python -c 'import triton' 2>/dev/null || \
		.venv/bin/python -m pip install --disable-pip-version-check --no-input '$(TRITON)'
	@touch $@

# From the source archive to reports of the installed package, outside the checkout.
wheel:
	rm -rf out/wheel && $(PYTHON) -m venv out/wheel/env
	out/wheel/env/bin/pip install --disable-pip-version-check --no-input -q build
	out/wheel/env/bin/python -m build --outdir out/wheel .
	out/wheel/env/bin/pip install --disable-pip-version-check --no-input -q -c constraints.txt "$$(ls out/wheel/*.whl)[report]"
	out/wheel/env/bin/pip install --disable-pip-version-check --no-input -q mypy pyright
	cp tests/ecosystem/typed_use.py out/wheel
	cd out/wheel && PATH=$(CURDIR)/out/wheel/env/bin:$$PATH PYTHONPATH= sh -e $(CURDIR)/tools/try_wheel

# The oldest versions that pyproject.toml allows, beside the newest of what they need in turn, which may call them outdated.
lowest:
	$(PYTHON) -m venv --clear out/lowest
	out/lowest/bin/pip install --disable-pip-version-check --no-input -q uv
	out/lowest/bin/uv pip compile -q --no-header --resolution lowest-direct --extra report --extra triton --extra peers pyproject.toml -o out/lowest/versions.txt
	out/lowest/bin/pip install --disable-pip-version-check --no-input -q -r out/lowest/versions.txt
	grep -E '^(accelerate|psutil|pytest|pytest-xdist|hypothesis|tensorboard)==' constraints.txt > out/lowest/tools.txt
	out/lowest/bin/pip install --disable-pip-version-check --no-input -q -c out/lowest/versions.txt -r out/lowest/tools.txt
	out/lowest/bin/pip install --disable-pip-version-check --no-input -q --no-deps -e .
	PATH=$(CURDIR)/out/lowest/bin:$$PATH out/lowest/bin/python -m pytest $(TWO_PROCESSES) \
		-W default::DeprecationWarning $(PYTEST_ARGS)

# What each library is asked is in tests/ecosystem; LIBRARIES='peft trl' picks some.
ecosystem:
	$(if $(filter onnx,$(or $(LIBRARIES),onnx)),npm install --prefix out/ecosystem/node --ignore-scripts --no-audit \
		--no-fund --loglevel error @huggingface/transformers@4.3.2)  # with onnxruntime for node and for browsers
	for library in $(or $(LIBRARIES),accelerate datasets peft torchao trl lm_eval onnx flash_pytorch); do \
		$(PYTHON) -m venv --clear out/ecosystem/$$library && \
		out/ecosystem/$$library/bin/pip install --disable-pip-version-check --no-input -q -c constraints.txt \
			-c tests/ecosystem/constraints.txt $$library accelerate peft pytest hypothesis onnxscript \
			onnxruntime-genai '.[onnx]' && \
		out/ecosystem/$$library/bin/python -m pytest --noconftest -m ecosystem -W ignore -k $$library tests/ecosystem || exit 1; done
	$(PYTHON) -m venv --clear out/ecosystem/stores  # whose libraries want older versions than constraints.txt has
	out/ecosystem/stores/bin/pip install --disable-pip-version-check --no-input -q torch==2.13.0 s3fs 'moto[server]' pytest .
	out/ecosystem/stores/bin/python -m pytest --noconftest -m ecosystem -W ignore tests/ecosystem/test_stores.py tests/ecosystem/test_arm.py
	$(PYTHON) -m venv --clear out/ecosystem/clearvoice  # without most of what it needs: one of its modules is read
	out/ecosystem/clearvoice/bin/pip install --disable-pip-version-check --no-input -q -c constraints.txt \
		-c tests/ecosystem/constraints.txt einops rotary-embedding-torch torchinfo pytest .
	out/ecosystem/clearvoice/bin/pip install --disable-pip-version-check --no-input -q --no-deps \
		-c tests/ecosystem/constraints.txt clearvoice
	out/ecosystem/clearvoice/bin/python -m pytest --noconftest -m ecosystem -W ignore tests/ecosystem/test_mossformer.py
	@ls /usr/bin/chromium /usr/bin/clang /usr/bin/wasm-ld /usr/include/wasm32-wasi /usr/lib/llvm-*/lib/clang/*/lib/wasi \
		> /dev/null 2>&1 || { echo "error: apt-get install chromium clang lld wasi-libc libclang-rt-14-dev-wasm32" >&2; exit 1; }
	$(PYTHON) -m venv --clear out/ecosystem/browser  # examples/browser, in the system's Chromium
	out/ecosystem/browser/bin/pip install --disable-pip-version-check --no-input -q -c tests/ecosystem/constraints.txt \
		torch==2.13.0 playwright pytest .
	out/ecosystem/browser/bin/python -m pytest --noconftest -m ecosystem -W ignore tests/ecosystem/test_browser.py

clean:
	rm -rf .venv .venv-docs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find lineartime tests -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help train test test-all lint types bench bench-all gpu docs drills campaign wheel lowest ecosystem env clean
