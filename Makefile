.PHONY: fmt lint type test test-slow test-distributed chaos

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

test-distributed:
	uv run pytest -m "distributed and not gpu"

KILLS = 100

chaos:
	PYTHONPATH=.:tests/system uv run python tests/system/chaos.py --kills $(KILLS)
