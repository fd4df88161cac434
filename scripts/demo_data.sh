# Sourced by the demos: where the demo's model and texts are, and its data, binarised once.

demo=datastores/demo built=datastores/demo/built
if [ ! -d $built/data-bin ]; then
  fairseq-ccpr prepare --train $demo/bible.train.tsv.xz --valid $demo/bible.valid.tsv.xz \
    --test $demo/bible.test.tsv.xz -s de -t en --path $demo/model.pt --output $built/data-bin
fi
