# make demo: set up .venv and run the main job.  make test: set up .venv and run the quick tests.
PYTHON ?= python3

.PHONY: demo test test-slow clean

demo: .venv/installed
	.venv/bin/python train.py

# one thread each: two busy processes with two torch threads each slow each other down many times over
test: .venv/installed-dev
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q

test-slow: .venv/installed-dev
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -m slow

.venv/bin/python:
	$(PYTHON) -m venv .venv || { rm -rf .venv; echo "Python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }

.venv/installed: requirements.txt | .venv/bin/python
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.venv/installed-dev: requirements-dev.txt requirements.txt | .venv/bin/python
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

clean:
	rm -rf .venv .pytest_cache .hypothesis __pycache__ tests/__pycache__ benchmarks/__pycache__
