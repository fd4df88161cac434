#!/usr/bin/env bash
# The recipe of the demo's base model: a small Transformer, on a GPU where there is one, else on the CPU in bf16. Stop it at
# any moment; the same command resumes from the last checkpoint.
#
#   scripts/recipes/train_base_model.sh TRAIN_TSV VALID_TSV OUTPUT_DIR [option of fairseq-train ...]
#
# SOURCE (de) and TARGET (en) are the languages of the tables' columns. REVERSE=1 exchanges the columns, and trains the model
# of the opposite direction, with which fairseq-ccpr build tokens --monolingual translates text back.
#
# SPM=spm.model DICT=dict.en.txt keep the subwords of an existing model, and FROM=model.pt its weights to start from, whichever
# its direction; without SPM and DICT new ones are made from the training text. UPDATES (56000) is how long to train: on 2 CPU
# cores some 5,600 updates take two hours.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }
train=$1 valid=$2 output=$3
shift 3
updates=${UPDATES:-56000} from=${SOURCE:-de} to=${TARGET:-en}
scripts=$(cd "$(dirname "$0")/.." && pwd)

exchange() { # TABLE OUTPUT
  python -c '
import sys
from pathlib import Path
from fairseq_ccpr.text.pairs import read_pairs
with open(sys.argv[2], "w", encoding="utf-8", newline="\n") as table:
    table.writelines(f"{target}\t{source}\n" for source, target in read_pairs(Path(sys.argv[1])))
' "$1" "$2"
}

if [ -n "${REVERSE:-}" ]; then
  read -r from to <<<"$to $from"
fi
if [ ! -d "$output/data-bin" ]; then
  if [ -n "${REVERSE:-}" ]; then
    mkdir -p "$output/text"
    exchange "$train" "$output/text/train.tsv"
    exchange "$valid" "$output/text/valid.tsv"
    train=$output/text/train.tsv valid=$output/text/valid.tsv
  fi
  fairseq-ccpr prepare --train "$train" --valid "$valid" -s "$from" -t "$to" --output "$output/data-bin" \
    ${SPM:+--sentencepiece-model "$SPM"} ${DICT:+--dict "$DICT"}
fi

if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  device="--fp16"
else
  device="--cpu"
fi
fairseq-train "$output/data-bin" --user-dir "$scripts/../fairseq_ccpr" --task translation_cpu_bf16 -s "$from" -t "$to" $device \
  --arch transformer --encoder-layers 5 --decoder-layers 3 --encoder-embed-dim 256 --decoder-embed-dim 256 \
  --encoder-ffn-embed-dim 1024 --decoder-ffn-embed-dim 1024 --encoder-attention-heads 4 --decoder-attention-heads 4 \
  --share-all-embeddings --max-source-positions 256 --max-target-positions 256 --skip-invalid-size-inputs-valid-test \
  --dropout 0 --criterion cross_entropy --max-tokens 3500 --max-update "$updates" \
  --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 \
  --lr-scheduler polynomial_decay --lr 1.2e-3 --end-learning-rate 1e-5 --warmup-updates 100 --total-num-update "$updates" \
  --save-dir "$output/checkpoints" --save-interval-updates 500 --keep-interval-updates 2 --no-epoch-checkpoints \
  --log-format simple --log-interval 50 ${FROM:+--finetune-from-model "$FROM"} "$@"

python "$scripts/recipes/halve_checkpoint.py" "$output/checkpoints/checkpoint_best.pt" "$output/model.pt"
echo "the model: $output/model.pt"
