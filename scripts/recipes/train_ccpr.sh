#!/usr/bin/env bash
# Trains a CCPR phrase encoder: a small multilingual encoder, phrase pairs by word alignment, fairseq-train; on a GPU
# where there is one, else on the CPU in bf16. Stop it at any moment; the same command resumes where it was.
#
#   scripts/recipes/train_ccpr.sh OUTPUT_DIR TRAIN_TSV [TRAIN_TSV ...] [-- option of fairseq-train ...]
#
# Each TSV holds sentence pairs: source, tab, target, in the languages SOURCE and TARGET (de and en); up to the first dot
# their names must differ. VALID (300) of the last pairs of each are held out; the best checkpoint is that with the
# highest acc@1 on their phrases. ENCODER=DIR is where to start from (else multilingual-e5-small, its vocabulary cut down
# to that of the texts). UPDATES (3000) is how long to train.
# OUTPUT_DIR/phrase-encoder/ccpr.pt, in its folder, is what --encoder of the other commands takes: the best checkpoint in
# fp16, without its optimizer, a sixth of the size.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
output=$1
shift
texts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do texts+=("$1"); shift; done
[ $# -eq 0 ] || shift
updates=${UPDATES:-3000}
scripts=$(cd "$(dirname "$0")/.." && pwd)
package=$scripts/../fairseq_ccpr

folders=()
for text in "${texts[@]}"; do
  name=$(basename "$text")
  folder=$output/phrases/${name%%.*}
  if [[ " ${folders[*]} " == *" $folder "* ]]; then
    echo "two texts are called ${name%%.*}, up to the first dot: rename $text" >&2
    exit 2
  fi
  folders+=("$folder")
done
encoder=${ENCODER:-$output/encoder}
[ -d "$encoder" ] || fairseq-ccpr convert --output "$encoder" --keep-pieces-of "${texts[@]}"
for at in "${!texts[@]}"; do
  [ -d "${folders[at]}/train" ] || fairseq-ccpr extract --pairs "${texts[at]}" --output "${folders[at]}" \
    --valid "${VALID:-300}" -s "${SOURCE:-de}" -t "${TARGET:-en}"
done

if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  device="--fp16"
else
  device="--cpu"
fi
# shellcheck disable=SC2046 - a file of options
fairseq-train "$(IFS=:; echo "${folders[*]}")" --user-dir "$package" $(cat "$package/lab/experiments/encoder_training.options") \
  $device --encoder "$encoder" --warmup-updates "$((updates / 10))" --total-num-update "$updates" --max-update "$updates" \
  --save-dir "$output/checkpoints" "$@"
kept=$output/phrase-encoder
mkdir -p "$kept"
find "$output/checkpoints" -maxdepth 1 -type f ! -name '*.pt' -exec cp {} "$kept" \;  # the tokenizer
python "$scripts/recipes/halve_checkpoint.py" "$output/checkpoints/checkpoint_best.pt" "$kept/ccpr.pt"
echo "the phrase encoder: $kept/ccpr.pt"
