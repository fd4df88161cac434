#!/usr/bin/env bash
# Phrases on real text: trains a small phrase encoder (CCPR) on Bible verses, makes a memory of the English verses alone,
# and translates the Bible without and with it. UPDATES (150) is how long to train; a tenth of what a good encoder needs.
# What is built lands in datastores/demo/built and is used again the next time.
set -euo pipefail
cd "$(dirname "$0")/.."
EXTRAS=cpu,align,encoder
. scripts/setup.sh
. scripts/demo_data.sh

pairs=$demo/bible.train.tsv.xz
[ -d $built/encoder ] || python scripts/convert_encoder.py --layers 6 --keep-pieces-of $pairs --output $built/encoder
[ -d $built/ccpr/phrase-encoder ] ||
  ENCODER=$built/encoder UPDATES=${UPDATES:-150} scripts/recipes/train_ccpr.sh $built/ccpr $pairs
[ -e $built/verses.en.txt ] || xz -dc $pairs | cut -f 2 > $built/verses.en.txt
python scripts/build_datastore.py phrases $built/verses.en.txt --encoder $built/ccpr/phrase-encoder/ccpr.pt --output $built/phrases
python scripts/compare_decoding.py $built/data-bin --path $demo/model.pt -s de -t en --datastore $built/phrases \
  --bpe sentencepiece --sentencepiece-model $demo/spm.model --beam 5 --max-tokens 4000 --results-path $built/phrase-results
echo 'Wen sucht ihr? Er ist auferstanden, er ist nicht hier.' |
  python scripts/retrieve_phrases.py $built/phrases --encoder $built/ccpr/phrase-encoder/ccpr.pt
