#!/usr/bin/env bash
# Trains an XPR phrase encoder: a small multilingual encoder, phrase pairs with example sentences, fairseq-train; on a GPU
# where there is one, else on the CPU in bf16. Stop it at any moment; the same command resumes where it was.
#
#   scripts/recipes/train_xpr.sh OUTPUT_DIR LEXICON_DIR [LEXICON_DIR ...] [-- option of fairseq-train ...]
#
# Each LEXICON_DIR is one of fairseq-ccpr lexicon, of any language pair; the best checkpoint is that with the highest
# acc@1 on the phrases of their valid parts. --lr is 1e-4 for so few updates; the paper's 2e-5 is for tens of thousands. ENCODER=DIR is where to start from (else multilingual-e5-small, its vocabulary
# cut down to that of the lexicons). PAIRS (256) is how many phrase pairs are a batch, UPDATES (1000) how long to train.
# OUTPUT_DIR/phrase-encoder/xpr.pt, in its folder, is what --encoder of the other commands takes: the best checkpoint in
# fp16, without its optimizer and momentum encoder.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
output=$1
shift
lexicons=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do lexicons+=("$1"); shift; done
[ $# -eq 0 ] || shift
updates=${UPDATES:-1000}
scripts=$(cd "$(dirname "$0")/.." && pwd)

encoder=${ENCODER:-$output/encoder}
if [ ! -d "$encoder" ]; then
  texts=()
  for lexicon in "${lexicons[@]}"; do texts+=("$lexicon"/*/{source,target}/{phrases,sentences}.txt); done
  fairseq-ccpr convert --output "$encoder" --keep-pieces-of "${texts[@]}"
fi

if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  device="--fp16"
else
  device="--cpu"
fi
fairseq-train "$(IFS=:; echo "${lexicons[*]}")" --user-dir "$scripts/../fairseq_ccpr/lab/xpr" --task phrase_lexicon $device \
  --arch phrase_encoder_xpr --encoder "$encoder" --criterion xpco --best-checkpoint-metric accuracy \
  --maximize-best-checkpoint-metric --optimizer adam --lr 1e-4 --lr-scheduler polynomial_decay \
  --warmup-updates "$(((updates + 99) / 100))" --total-num-update "$updates" --max-update "$updates" --clip-norm 1 \
  --batch-size "${PAIRS:-256}" --save-dir "$output/checkpoints" --save-interval-updates 100 --validate-interval-updates 100 \
  --keep-interval-updates 1 --no-epoch-checkpoints --log-format simple --log-interval 10 --num-workers 0 "$@"
kept=$output/phrase-encoder
mkdir -p "$kept"
find "$output/checkpoints" -maxdepth 1 -type f ! -name '*.pt' -exec cp {} "$kept" \;  # the tokenizer
python "$scripts/recipes/halve_checkpoint.py" "$output/checkpoints/checkpoint_best.pt" "$kept/xpr.pt"
echo "the phrase encoder: $kept/xpr.pt"
