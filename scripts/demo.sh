#!/usr/bin/env bash
# The main job on real text: a German-English model of software texts translates the Bible, without and with a
# datastore of Bible verses. What is built lands in datastores/demo/built and is used again the next time.
set -euo pipefail
cd "$(dirname "$0")/.."
EXTRAS=cpu
. scripts/setup.sh
echo "1/3 sentence pairs into subwords" >&2
. scripts/demo_data.sh
echo "2/3 a datastore of 23,621 verses (four minutes on two cores the first time)" >&2
fairseq-ccpr build tokens $built/data-bin --path $demo/model.pt --output $built/datastore
echo "3/3 1,289 verses without and with it" >&2
fairseq-ccpr compare $built/data-bin --datastore $built/datastore $(cat $demo/knn.options) --beam 5 --max-tokens 4000 \
  --results-path $built/results
