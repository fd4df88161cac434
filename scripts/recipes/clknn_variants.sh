#!/usr/bin/env bash
# Measures the choices of CLKNN on your domain: each variant of a table is built from the same raw keys, tuned on
# valid and decoded with on test; then all are compared. Stop it at any moment; the same command resumes.
#
#   scripts/recipes/clknn_variants.sh TABLE DATA_BIN MODEL RAW_DATASTORE OUTPUT_DIR [option of fairseq-generate ...]
#
# TABLE is one of
#   contrasts  numbers of positives and negatives, (M, N): table 3 of the CLKNN paper
#   choices    random negatives, vectors scaled to length 1 before PCA too, no PCA
#   adapters   this domain's adapter against others', which ADAPTERS="name=checkpoint_best.pt ..." gives
# The options are those of your decoding: --beam, --max-tokens and so on. The first variant of each
# table is the default, and p-values are against it. QUERIES=DIR, a raw datastore of held-out text, is what precision is
# measured on; KEY_LAYER=last_ffn_input goes with raw keys of that layer.
set -euo pipefail
[ $# -ge 5 ] || { sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2; }
table=$1 data=$2 model=$3 raw=$4 out=$5
shift 5
decoding=("$@")
scripts=$(cd "$(dirname "$0")/.." && pwd)
languages=()
while [ $# -gt 0 ]; do
  case $1 in -s | -t | --source-lang | --target-lang) languages+=("$1" "$2") ;; esac
  shift
done
names=()

variant() { # NAME [option of fairseq-ccpr build ...]
  local name=$1 store=$out/$1
  shift
  names+=("$name")
  fairseq-ccpr build tokens "$data" --path "$model" "${languages[@]}" --output "$store" \
    --raw-datastore "$raw" --key-layer "${KEY_LAYER:-decoder_output}" --quiet "$@"
  local results=$out/results/$name
  [ -f "$results/tuned.txt" ] || {
    mkdir -p "$results"
    fairseq-ccpr tune "$data" --path "$model" --datastore "$store" "${decoding[@]}" \
      --no-progress-bar --decode 2 --output "$results/options"
    mv "$results/options" "$results/tuned.txt"
  }
  [ -f "$results/comparison.json" ] || fairseq-ccpr compare "$data" --path "$model" --datastore "$store" \
    "${decoding[@]}" --no-progress-bar --results-path "$results" $(cat "$results/tuned.txt")
}

case $table in
  contrasts)
    for pair in "2 32" "1 1" "1 32" "2 16" "2 64" "4 32"; do
      read -r m n <<<"$pair"
      if [ "$pair" = "2 32" ]; then variant default --adapter clknn; else
        variant "M$m-N$n" --adapter clknn --adapter-options "--positives $m --negatives $n"
      fi
    done
    ;;
  choices)
    variant default --adapter clknn
    variant random-negatives --adapter clknn --adapter-options "--negative-sampling random"
    variant no-pca --adapter "$out/default/adapter/checkpoint_best.pt" --pca-dim 0
    ;;
  adapters)
    variant default --adapter clknn
    for named in $ADAPTERS; do variant "${named%%=*}" --adapter "${named#*=}"; done
    ;;
  *) echo "TABLE is '$table': give contrasts, choices or adapters" >&2; exit 2 ;;
esac

stores=() outputs=()
for name in "${names[@]}"; do
  stores+=("$name=$out/$name")
  outputs+=("$name=$out/results/$name/retrieval.txt")
done
fairseq-ccpr evaluate keys "$raw" "${stores[@]}" --k 8 ${QUERIES:+--held-out "$QUERIES"} --quiet
echo
fairseq-ccpr evaluate systems "$out/results/default/reference.txt" "${outputs[@]}" --json "$out/results/$table.json"
