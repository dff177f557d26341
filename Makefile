.PHONY: fmt lint type test test-slow gpu gpu-stand-in chaos hostile bench

fmt:
	uv run ruff format .
	uv run ruff check --fix .

lint:
	uv run ruff format --check .
	uv run ruff check .

type:
	uv run mypy

test:
	uv run pytest

test-slow:
	uv run pytest -m "slow and not gpu"

PYTHON = $(if $(shell command -v uv),uv run python,python3)

gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu
	$(PYTHON) -m tests.benchmarks.gpu --json gpu.json

gpu-stand-in:
	$(PYTHON) -m pytest -m "not gpu" tests/gpu
	$(PYTHON) -m tests.benchmarks.gpu --stand-in --json gpu-stand-in.json

KILLS = 1000

chaos:
	TORCH_CPP_LOG_LEVEL=ERROR PYTHONPATH=. uv run python tests/system/chaos.py --kills $(KILLS)

hostile:
	uv run python -m tests.hostile

DATA = shapes.yaml

bench:
	uv run python -m tests.benchmarks.loader --data $(DATA)
	uv run python -m tests.benchmarks.step --data $(DATA)
	uv run python -m tests.benchmarks.val --data $(DATA)
	uv run python -m tests.benchmarks.startup --data $(DATA)
	uv run python -m tests.benchmarks.memory --data $(DATA)
	uv run torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.ddp --data $(DATA)
	uv run python -m tests.benchmarks.scaling
