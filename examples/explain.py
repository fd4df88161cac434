"""Write a page that shows where each token came from. From the repository: python examples/explain.py [PAGE]"""

import sys

from fairseq_ccpr import Translator

page = sys.argv[1] if len(sys.argv) > 1 else "explanation.html"
with Translator("datastores/demo/model.pt", datastore="datastores/demo/ready") as translator:
    translator.explain("Und er nahm sie in seine Arme und segnete sie.").save(page)
print(f"open {page} in a browser")
