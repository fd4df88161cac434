#!/usr/bin/env bash
# Everything that needs a GPU, in ten minutes: is search right there, how fast is it, does decoding wait for the host, and how
# fast does it translate with a million and ten million keys. OUTPUT/gpu.json has all figures, gpu.md all tables.
#
#   scripts/recipes/gpu_check.sh OUTPUT [STORES DATA_BIN and options of `fairseq-ccpr benchmark decoding`]
#
# STORES has datastores, tuned, of those called raw, clknn, text and phrases: the page has their settings, and whether there
# is trust. Without it decoding is not measured; without fairseq, search alone is, with nothing but torch. In a copy without
# git, COMMIT=... says what it is of. REHEARSE=1 goes through everything on a CPU with a few keys.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ $# -lt 1 ]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
output=$1
shift
sizes=(1000000 10000000) batches=(1 800 12800) repeats=3 faster=(--fp16) lists=IVF1024,SQfp16 patience=1
if [ -n "${REHEARSE:-}" ]; then
  sizes=(3000 6000) batches=(1 60) repeats=1 faster=(--cpu) lists=IVF16,SQfp16 patience=10
elif ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "gpu_check.sh needs a GPU that torch can use, and here is none: run it where there is one, with torch for CUDA" >&2
  exit 1
fi
systems=() tokens=() others=
if [ $# -gt 0 ]; then
  stores=$1
  shift
  for name in raw clknn text phrases; do
    [ -d "$stores/$name" ] || continue
    if [ ! -f "$stores/$name/tuned.json" ]; then
      echo "$stores/$name is not tuned: run fairseq-ccpr tune, as figures are of tuned settings, with trust" >&2
      exit 2
    fi
    system=${name/raw/knn-mt}=$stores/$name
    systems+=("$system")
    case $name in raw | clknn) tokens+=("$system") ;; esac
    [ "$name" = raw ] || others="$others${others:+:}$stores/$name"
  done
  if [ ${#systems[@]} -eq 0 ]; then
    echo "$stores has no datastore called raw, clknn, text or phrases: give the folder of some" >&2
    exit 2
  fi
fi
mkdir -p "$output"
rm -f "$output"/{search,exact-*,faiss,gpu}.{json,md} # of earlier runs
failed=

stage() { # SECONDS NAME COMMAND...
  local limit=$1 name=$2
  shift 2
  echo "== $name" >&2
  timeout $((limit * patience)) "$@" || { echo "== $name failed: exit code $?" >&2; failed="$failed $name"; }
}

measure() { # SECONDS NAME OPTIONS OF BENCHMARK...
  local limit=$1 name=$2
  shift 2
  stage "$limit" "$name" python -m fairseq_ccpr benchmark decoding "$@" "${faster[@]}" --only decoding --quiet \
    --batches "${batches[@]}" --repeats "$repeats" --json "$output/$name.json" > "$output/$name.md"
}

stage 140 search python scripts/recipes/gpu_search.py "$output"
if python -c 'import fairseq, pytest' 2>/dev/null; then
  stage 100 tests python -m pytest -q -x -p no:cacheprovider tests/test_device.py tests/decoding/test_beam_step.py \
    tests/search/test_placement.py tests/search/test_indexes.py \
    tests/test_translator.py::test_a_gpu_translates_as_the_cpu_does
  if [ ${#systems[@]} -gt 0 ]; then
    sized=("${tokens[@]}")
    case $others in *:*)
      systems+=("all=$others")
      case $others in *"$stores/clknn"*) sized+=("all=$others") ;; esac
      ;;
    esac
    measure 130 "exact-${sizes[0]}" "$@" --systems "${systems[@]}" --sizes "${sizes[0]}" --index exact
    if [ ${#tokens[@]} -gt 0 ]; then
      measure 100 "exact-${sizes[1]}" "$@" --systems "${sized[@]}" --sizes "${sizes[1]}" --index exact
      if [ -n "${REHEARSE:-}" ] || python -c 'import faiss; faiss.StandardGpuResources' 2>/dev/null; then
        measure 80 faiss "$@" --systems "${tokens[@]}" --sizes "${sizes[0]}" --index "$lists"
      fi
    fi
  fi
else
  echo "== without fairseq and pytest, search alone was checked" >&2
fi
python scripts/recipes/gpu_section.py "$output" ${COMMIT:+"$COMMIT"} || failed="$failed section"
if [ -n "$failed" ]; then
  echo "failed:$failed" >&2
  exit 1
fi
