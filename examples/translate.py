"""Translate with a datastore, and look at what was nearly written. From the repository: python examples/translate.py"""

from fairseq_ccpr import Translator

with Translator("datastores/demo/model.pt", datastore="datastores/demo/ready", beam=4, nbest=2) as translator:
    for translation in translator.translate(
        ["Und es traten Pharisäer herzu und fragten ihn.", "Jesus aber sprach zu ihm: Komm!"]
    ):
        print(translation.text, f"{translation.score:.2f}")
        for other in translation.alternatives:
            print(" or", other.text, f"{other.score:.2f}")
    print(translator.signature)  # belongs with every result
