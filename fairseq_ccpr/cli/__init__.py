"""The commands: parse, call, print. Each is a module here, a script of `scripts/`, and `fairseq-ccpr-NAME`."""

from importlib import import_module
from pathlib import Path

# setup.py reads this dictionary without importing the package.
COMMANDS = {
    "prepare_data": "make a DATA_BIN from sentence pairs",
    "build_datastore": "build a datastore from a corpus",
    "merge_datastores": "merge datastores, or take texts out of one",
    "inspect_datastore": "show what a datastore holds, and whether it is whole",
    "translate": "translate text with a model and a datastore",
    "compare_decoding": "measure what retrieval changes, in quality and speed",
    "tune_retrieval": "choose the settings of retrieval on a held-out subset",
    "explain_translation": "write a page that shows where each token of a translation came from",
    "retrieve_phrases": "show which phrases of a datastore translate those of a text",
    "convert_encoder": "make an encoder directory from a pretrained model",
    "extract_phrases": "extract phrase pairs from sentence pairs",
    "build_lexicon_dataset": "find example sentences for the phrases of a dictionary",
    "mine_bitext": "mine sentence pairs from two texts that were not aligned",
    "compare_systems": "compare translations of a test set, with significance",
    "evaluate_retrieval": "measure how often keys find the right token",
    "evaluate_phrases": "measure how often a phrase in its sentence finds its translation",
    "evaluate_phrase_types": "measure how often a phrase of a dictionary finds its translation",
    "evaluate_retrieved_phrases": "compare what phrase datastores retrieve with reference translations",
    "evaluate_alignments": "measure the alignment error rate on gold alignments",
    "evaluate_mining": "measure how well translations are found among sentences many of which have none",
    "benchmark": "measure the speed of decoding and of search with datastores of any size",
    "benchmark_phrases": "measure the speed and size of phrase datastores",
    "run_experiment": "run a domain-adaptation experiment from a file of its settings",
    "report": "show the results of experiments as a page",
}


def run_script(path: str) -> None:
    """Run the command that a file of `scripts/` is named after."""
    import_module(f"{__name__}.{Path(path).stem}").main()
