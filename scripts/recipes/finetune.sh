#!/usr/bin/env bash
# Trains a translation model further on the sentence pairs of a domain, as an alternative to a datastore of them, or to put
# one on top. Each learning rate gets MINUTES at most; the model with the lowest validation loss is kept.
#
#   scripts/recipes/finetune.sh MODEL DATA_BIN OUTPUT_DIR MINUTES option of fairseq-train ...
#
# The options are those that the model was trained with: --arch and its sizes, and --task where it is not translation.
# RATES ("1e-4 3e-4") is which learning rates to try. Stop it at any moment; the same command resumes.
set -euo pipefail
[ $# -ge 5 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
model=$1 data=$2 output=$3 minutes=$4
shift 4
scripts=$(cd "$(dirname "$0")/.." && pwd)
package=$(cd "$scripts/../fairseq_ccpr" && pwd)

if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  device="--fp16"
else
  device="--cpu"
fi
trained=()
hours=$(python -c 'import sys; print(float(sys.argv[1]) / 60)' "$minutes")
for rate in ${RATES:-1e-4 3e-4}; do
  # shellcheck disable=SC2046 - a file of options
  fairseq-train "$data" --user-dir "$package" $(cat "$package/lab/experiments/fine_tuning.options") $device \
    --finetune-from-model "$model" --stop-time-hours "$hours" --save-dir "$output/$rate" "$@" --lr "$rate"
  trained+=("$output/$rate/checkpoint_best.pt")
done
best=$(python -c '
import sys, torch
from fairseq_ccpr import models  # names what a fairseq checkpoint may hold
print(min(sys.argv[1:], key=lambda path: torch.load(path, map_location="cpu")["extra_state"]["best"]))
' "${trained[@]}")
python "$scripts/recipes/halve_checkpoint.py" "$best" "$output/model.pt"
echo "the model: $output/model.pt, of $best"
