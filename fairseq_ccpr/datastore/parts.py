"""What the parts of a datastore consist of: each file with its shape, its dtype, and when it is there.

The order is that of the manifest; datastores/README.md says what the numbers mean. `s` is what describes the
files: the section of the manifest, or the description of the source index in it.
"""

from __future__ import annotations

from fairseq_ccpr.datastore.schema import KeyForm, PartFile, place_type, token_type

# Tokens. The projection is there where keys are not the decoder's own states; symbols are the target
# vocabulary, one per line by id, so that values can be read without the model.
KEYS, VALUES, PROVENANCE = "keys", "values", "provenance"
SYMBOLS, PROJECTION_FILE = "symbols.txt", "projection.safetensors"
# Their source sentences
PLACES, SUBWORDS, SOURCE_HASHES = "sentences", "source-subwords", "source-hashes"
FIRSTS, POSTINGS, WORTHS = "postings-first", "postings", "postings-worth"
# Phrases. `LINES` are the sentences, one per line; `TOTALS` was counted when they were built; `MEMBERS`
# says of which text each sentence is, where several were merged.
SPANS, STRING_HASHES, MEMBERS = "spans", "string-hashes", "sources"
LINES, LINE_OFFSETS, TOTALS = "sentences.txt", "sentence-offsets", "totals.json"
# Text
TEXT_TOKENS, TEXT_OFFSETS, CONTEXTS, PREFIXES = "tokens", "offsets", "contexts", "contexts-index"
FOLLOWING, GRAMS, COUNTS = "following", "grams", "counts"

FP16 = KeyForm("float16", "fp16")
KEY_FILE = PartFile(
    KEYS,
    lambda s: (s.size, s.KEY_FORM.width(s.dimension)),
    lambda s: s.KEY_FORM.dtype,
    there=lambda s: s.store is None,
)
SOURCE_FILES = (
    # the first entry and the first subword of each sentence, and the ends
    PartFile(PLACES, lambda s: (s.sentences + 1, 2), "int64"),
    PartFile(SUBWORDS, lambda s: (s.subwords,), "int32"),
    PartFile(SOURCE_HASHES, lambda s: (s.sentences,), "uint64"),  # 0 where a number has no entries
    PartFile(FIRSTS, lambda s: (s.vocabulary + 1,), "int64"),  # first posting of each subword, and the end
    PartFile(POSTINGS, lambda s: (s.postings,), "int32"),  # the sentences that have a subword, ascending
    PartFile(WORTHS, lambda s: (s.postings,), "float16"),  # what it is worth there
)
TOKEN_FILES = (
    KEY_FILE,
    PartFile(VALUES, lambda s: (s.size,), "int32"),
    PartFile(PROVENANCE, lambda s: (s.size, 2), "int32"),
    PartFile(SYMBOLS),
    PartFile(PROJECTION_FILE, there=lambda s: s.projection is not None),
    *(file.within("source_index") for file in SOURCE_FILES),
)
PHRASE_FILES = (
    KEY_FILE,
    PartFile(SPANS, lambda s: (s.size, 3), "int32"),
    PartFile(LINE_OFFSETS, lambda s: (s.sentences + 1,), "int64"),
    PartFile(LINES),
    PartFile(TOTALS),
    PartFile(STRING_HASHES, lambda s: (s.size,), "uint64"),
    PartFile(MEMBERS, lambda s: (s.sentences, len(s.sources)), "bool", there=lambda s: s.sources),
)
TEXT_FILES = (
    PartFile(TEXT_TOKENS, lambda s: (s.size,), lambda s: token_type(s.words)),
    PartFile(TEXT_OFFSETS, lambda s: (s.sentences + 1,), "int64"),
    PartFile(CONTEXTS, lambda s: (s.tables[CONTEXTS][0],), "int64"),
    PartFile(PREFIXES, lambda s: (s.tables[CONTEXTS][1] + 1,), lambda s: place_type(s.tables[CONTEXTS][0])),
    PartFile(FOLLOWING, lambda s: (s.tables[CONTEXTS][0], 4), "uint32"),
    PartFile(GRAMS, lambda s: (s.tables[GRAMS][0],), "int64"),
    PartFile(COUNTS, lambda s: (s.tables[GRAMS][0], 2), "uint32"),
)
