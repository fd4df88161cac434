#!/usr/bin/env bash
# Sets up what the tests need and runs what a change needs: format, lint, types, imports between rooms, documentation, tests.
# --all runs all tests, which is what CI does; it and other arguments go to pytest. TEST_PROCESSES=4 runs four at a time.
set -euo pipefail
cd "$(dirname "$0")/.."
EXTRAS=cpu,align,encoder,muse,milvus,serve,files,test,docs
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
# In their order, a share to each process; one that is done takes over from the others.
tests=0
pytest -n "${TEST_PROCESSES:-$(env -u OMP_NUM_THREADS nproc)}" --dist worksteal "$@" || tests=$?
if ! wait $!; then
  cat "$checks" >&2
  echo "types, imports or documentation: see above" >&2
  exit 1
fi
tail -n 3 "$checks"
exit "$tests"
