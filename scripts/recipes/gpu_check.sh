#!/usr/bin/env bash
# Everything that needs a GPU, in ten minutes: is search right there, how fast is it, does decoding wait for the host, and how
# fast does it translate. Leaves the rows of docs/speed.md in OUTPUT.
#
#   scripts/recipes/gpu_check.sh OUTPUT [DATA_BIN and options of `fairseq-ccpr benchmark decoding`]
#
# Without a data folder decoding is not measured; without fairseq, search alone is, with nothing but torch.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ $# -lt 1 ]; then
  sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
output=$1
shift
if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "gpu_check.sh needs a GPU that torch can use, and here is none: run it where there is one, with torch for CUDA" >&2
  exit 1
fi
mkdir -p "$output"
failed=

stage() { # SECONDS NAME COMMAND...
  local limit=$1 name=$2
  shift 2
  echo "== $name" >&2
  timeout "$limit" "$@" || { echo "== $name failed: exit code $?" >&2; failed="$failed $name"; }
}

stage 210 search python scripts/recipes/gpu_search.py "$output"
if python -c 'import fairseq, pytest' 2>/dev/null; then
  stage 150 tests python -m pytest -q -x -p no:cacheprovider tests/test_device.py tests/decoding/test_beam_step.py \
    tests/search/test_placement.py tests/search/test_indexes.py \
    tests/test_translator.py::test_a_gpu_translates_as_the_cpu_does
  if [ $# -gt 0 ]; then
    stage 240 decoding python -m fairseq_ccpr benchmark decoding "$@" --fp16 --only decoding --quiet \
      --json "$output/decoding.json" > "$output/decoding.md"
    cat "$output/decoding.md"
  fi
else
  echo "== without fairseq and pytest, search alone was checked" >&2
fi
if [ -n "$failed" ]; then
  echo "failed:$failed" >&2
  exit 1
fi
