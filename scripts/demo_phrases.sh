#!/usr/bin/env bash
# Phrases on real text: a memory of English Bible verses alone, by a phrase encoder (CCPR) that has seen no verse, for the
# model of software texts that translates the Bible without and with it. What is built lands in datastores/demo/built and is
# used again the next time. scripts/recipes/train_ccpr.sh trains such an encoder.
set -euo pipefail
cd "$(dirname "$0")/.."
EXTRAS=cpu
. scripts/setup.sh
. scripts/demo_data.sh

encoder=$demo/ccpr/ccpr.pt
if [ ! -e $built/verses.en.txt ]; then
  xz -dc $demo/bible.train.tsv.xz | cut -f 2 > $built/verses.partial
  mv $built/verses.partial $built/verses.en.txt
fi
fairseq-ccpr build phrases $built/verses.en.txt --encoder $encoder --bf16 --output $built/phrases
fairseq-ccpr compare $built/data-bin --path $demo/model.pt --datastore $built/phrases \
  --beam 5 --max-tokens 4000 --results-path $built/phrase-results
echo 'Die Jünger gingen auf den Berg, und Jesus lehrte sie in Gleichnissen.' |
  fairseq-ccpr retrieve $built/phrases
