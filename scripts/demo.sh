#!/usr/bin/env bash
# The main job on real text: a German-English model of software texts translates the Bible, without and with a
# datastore of Bible verses. What is built lands in datastores/demo/built and is used again the next time.
set -euo pipefail
cd "$(dirname "$0")/.."
EXTRAS=cpu
. scripts/setup.sh
. scripts/demo_data.sh

fairseq-ccpr build tokens $built/data-bin --path $demo/model.pt --output $built/datastore
fairseq-ccpr compare $built/data-bin --datastore $built/datastore $(cat $demo/knn.options) --beam 5 --max-tokens 4000 \
  --results-path $built/results
