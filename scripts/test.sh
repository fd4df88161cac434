#!/usr/bin/env bash
# Sets up what the tests need and runs all of them: format, lint, types, imports between rooms, documentation, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
EXTRAS=cpu,align,encoder,muse,milvus,serve,test,docs
. scripts/setup.sh
# One thread each: more would wait for each other.
export OMP_NUM_THREADS=1
ruff format --check .
ruff check .
# Compiled once here: where Python may write no bytecode, each process that a test starts would compile all modules.
python -m compileall -q fairseq_ccpr
# What needs no test runs beside them, and says in the end what it found.
checks=$(mktemp)
trap 'rm -f "$checks"' EXIT
(mypy && lint-imports --no-cache && python scripts/docs.py && zensical build --clean --strict) >"$checks" 2>&1 &
# Two at a time, a file to each, in the order of conftest.py.
tests=0
pytest -n 2 --dist loadfile --no-loadscope-reorder "$@" || tests=$?
if ! wait $!; then
  cat "$checks" >&2
  echo "types, imports or documentation: see above" >&2
  exit 1
fi
tail -n 3 "$checks"
exit "$tests"
