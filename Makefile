.PHONY: fmt lint type docs test test-slow compat build release gpu gpu-stand-in chaos hostile bench bench-peers

RUN = uv run --group dev

fmt:
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

lint:
	$(RUN) ruff format --check .
	$(RUN) ruff check .

type:
	$(RUN) mypy
	$(RUN) mypy examples

docs:
	NO_MKDOCS_2_WARNING=1 uv run --group docs python -m mkdocs build --strict

test:
	$(RUN) pytest

test-slow:
	$(RUN) --group slow pytest -m "slow and not gpu"

compat:
	$(RUN) python -m tests.compat
	$(RUN) python -m tests.compat --extras

build:
	rm -rf dist
	uv build
	uvx "twine>=6.1" check --strict dist/*

release:
	$(RUN) python -m tests.release
	$(MAKE) lint type test test-slow build

PYTHON = $(if $(shell command -v uv),$(RUN) python,python3)

# One process, and without pytest-xdist where that is missing.
PYTEST = $(PYTHON) -m pytest -o addopts="--strict-markers --import-mode=importlib -q"

gpu:
	$(PYTEST) -m gpu tests/gpu
	$(PYTHON) -m tests.benchmarks.gpu --json gpu.json
	$(PYTHON) -m tests.benchmarks.gpu --cfg tessera-s.yaml --json gpu-tessera.json

gpu-stand-in:
	$(PYTEST) -m "not gpu" tests/gpu
	$(PYTHON) -m tests.benchmarks.gpu --stand-in --json gpu-stand-in.json

KILLS = 1000

chaos:
	TORCH_CPP_LOG_LEVEL=ERROR PYTHONPATH=. $(RUN) python tests/system/chaos.py --kills $(KILLS)

hostile:
	$(RUN) python -m tests.hostile

DATA = shapes.yaml

bench:
	$(RUN) python -m tests.benchmarks.loader --data $(DATA)
	$(RUN) python -m tests.benchmarks.step --data $(DATA)
	$(RUN) python -m tests.benchmarks.step --data $(DATA) --cfg tessera-n.yaml
	$(RUN) python -m tests.benchmarks.val
	$(RUN) python -m tests.benchmarks.startup --data $(DATA)
	$(RUN) python -m tests.benchmarks.memory --data $(DATA)
	$(RUN) torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.ddp --data $(DATA)
	$(RUN) python -m tests.benchmarks.detect

# Beside YOLOv5 and Ultralytics where they are installed; each is named by hand.
YOLOV5 =
YOLOV5_PYTHON = python3
YOLO = yolo
PEERS = --imgsz 320 --epochs 60 --rounds 1

bench-peers:
	$(RUN) python -m tests.benchmarks.peers --data $(DATA) $(PEERS) --yolov5 "$(YOLOV5)" --yolov5-python "$(YOLOV5_PYTHON)" --yolo "$(YOLO)"
