#!/usr/bin/env bash
# Sets up what the tests need and runs all of them: format, lint, types, imports between rooms, documentation, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
EXTRAS=cpu,align,encoder,muse,milvus,serve,test,docs
. scripts/setup.sh
ruff format --check .
ruff check .
mypy
lint-imports --no-cache
python scripts/docs.py
zensical build --clean --strict
# Two at a time, a file to each, on one thread: more would wait for each other.
export OMP_NUM_THREADS=1
pytest -n 2 --dist loadfile "$@"
