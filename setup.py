"""Packaging of fairseq-ccpr; `constraints.txt` pins the versions that were tested together."""

import ast
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

HERE = Path(__file__).parent
PACKAGE = HERE / "fairseq_ccpr"


def read_constant(path: str, name: str) -> Any:
    """The value of a constant in a module of the package, which is not imported: that would need all it depends on."""
    assignments = [node for node in ast.parse((PACKAGE / path).read_text("utf-8")).body if isinstance(node, ast.Assign)]
    return next(ast.literal_eval(node.value) for node in assignments if ast.unparse(node.targets[0]) == name)


setup(
    name="fairseq-ccpr",
    version=read_constant("version.py", "__version__"),
    description="Retrieval-augmented machine translation as a fairseq plug-in (with ve-fairseq, in place of fairseq)",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11,<3.13",  # as wheels of fairseq exist; docs/models.md tells which were tried
    packages=find_packages(include=["fairseq_ccpr", "fairseq_ccpr.*"]),
    package_data={
        "fairseq_ccpr": ["py.typed"],
        "fairseq_ccpr.cli": ["*.json"],
        "fairseq_ccpr.evaluation": ["*.html", "*.css", "*.js"],
        "fairseq_ccpr.server": ["*.html", "*.css", "*.js"],
        "fairseq_ccpr.lab.experiments": ["*.html", "*.css", "*.options"],
    },
    install_requires=[
        # fairseq 0.12.2, the last release, does not import on Python 3.11 and later; ve-fairseq is fairseq's main branch with
        # that mended. It has the same modules and so installs over a `fairseq` that is there; uninstalling one of the two
        # then takes files of the other. Use an environment without fairseq.
        "ve-fairseq==0.12.3",
        # 2.6 is the first release that loads checkpoints with weights_only unless told otherwise, and 2.8 the first that
        # multiplies halves into fp32 on a GPU.
        "torch>=2.8",
        "numpy>=1.24",
        # BLEU and chrF with signatures.
        "sacrebleu>=2.3",
        # The subword model of the demo, and of most models that come with one; 0.2 brought offsets of normalised text.
        "sentencepiece>=0.2.0",
        # Tags of languages: those of files, of clients and of models are compared. Its data are its own; names it lacks.
        "langcodes>=3.5",
        # Boundaries of words by Unicode, for glossaries; fairseq brings it as well.
        "regex",
        # Progress bars; fairseq brings it as well.
        "tqdm",
        # An adapter and its PCA in a datastore: tensors that are never unpickled.
        "safetensors>=0.4",
        # The settings inside files of Marian's own format; fairseq brings it as well.
        "pyyaml",
        # t-SNE; fairseq brings it as well.
        "scikit-learn>=1.3",
        # Disjoint sets of strings, and the exact binomial test (1.7) that is McNemar's; scikit-learn brings it as well.
        "scipy>=1.7",
        # Completion in the shell, made of the parsers.
        "shtab>=1.7",
        # Pictures of tuning and of retrieval.
        "matplotlib>=3.7",
    ],
    extras_require={
        **read_constant("errors.py", "EXTRAS"),
        # The subwords and tokenizer of models that have no SentencePiece are tested with their own packages.
        "test": [
            "pytest>=8",
            "pytest-xdist>=3",
            "hypothesis>=6",
            # Its language models estimate what a text memory does, by another implementation.
            "nltk>=3.9",
            "ruff>=0.6",
            "mypy>=1.10",
            # The rooms of ARCHITECTURE.md import downwards only.
            "import-linter>=2.0",
            "subword-nmt>=0.3.8",
            "sacremoses>=0.1",
            # Clients of LibreTranslate, which have to work unchanged.
            "libretranslatepy>=2.1.4",
            "libretranslate-aio>=0.1.3",
            "deep-translator>=1.11.4",
            "transpolibre>=0.8.15",
            # A browser's remote control; the browser is the system's Chromium.
            "playwright>=1.40",
            # Marian models, for what is converted to be compared with.
            "transformers>=5",
        ],
        # The site of the documentation, see mkdocs.yml.
        "docs": ["zensical==0.0.73"],  # its settings may still change between releases
        # What scripts/marian_speed.py compares a converted model with.
        "benchmark": ["ctranslate2>=4", "transformers>=5"],
    },
    entry_points={"console_scripts": ["fairseq-ccpr = fairseq_ccpr.cli:main"]},
)
