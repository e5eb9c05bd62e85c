# Two commands: `make demo` and `make test`. Each sets up what it needs, once, in .venv.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt

# FlashInfer without the 1.3 GB it declares: enough to import it, which is all that tests without a GPU do.
ifeq ($(shell uname -sm),Linux x86_64)
LIGHT_FLASHINFER := $(PIP) --no-deps flashinfer-python apache-tvm-ffi nvidia-ml-py cuda-bindings cuda-pathfinder \
	requests urllib3 idna certifi charset-normalizer packaging tqdm
endif

.PHONY: demo test lint clean

demo: $(VENV)/.kimi
	$(VENV)/bin/python -m kimi_k25.generate -i kimi_k25/tiny/demo.png -p "What digit is this?"
	@echo 'Next: $(VENV)/bin/python -m kimi_k25.generate -i PICTURE -p "What colour is the star?"'
	@echo 'For the other lines of README.md: source $(VENV)/bin/activate'

test: $(VENV)/.test lint
	$(VENV)/bin/python -m pytest -n 2

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/aliasmix lint aliasmix kimi_k25

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# The stamps carry what was installed: a change of pins or dependencies installs again, a second run does not.
$(VENV)/.kimi: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[kimi]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[test]'
	$(LIGHT_FLASHINFER)
	touch $@ $(VENV)/.kimi

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
