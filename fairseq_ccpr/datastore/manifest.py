"""`manifest.json`: what each part of a datastore is, and how it was built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from fairseq_ccpr.datastore.parts import (
    COUNTS,
    FP16,
    KEYS,
    PHRASE_FILES,
    PROVENANCE,
    SOURCE_FILES,
    SPANS,
    TEXT_FILES,
    TOKEN_FILES,
    VALUES,
)
from fairseq_ccpr.datastore.schema import Described, KeyForm
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.search import IndexDescription, RemoteKeys, StoreAddress
from fairseq_ccpr.search.index_plan import PHRASE_DEPTH, PHRASE_EFFORT, TOKEN_EFFORT, Effort
from fairseq_ccpr.storage.files import (
    MANIFEST,
    PARTIAL,
    PLAN,
    only_writer,
    read_versioned,
    sync_directory,
    write_checked_json,
)
from fairseq_ccpr.version import __version__

MANIFEST_VERSION = 15  # the only one that is read
TOKEN, PHRASE, TEXT = "token", "phrase", "text"  # the folders of the parts
EXACT = IndexDescription("exact", "ip")
REVERSE_MODEL = "reverse_model"  # fingerprint of the model whose back-translations are the sources of tokens


@dataclass(frozen=True)
class ProjectionDescription:
    """A projection as the manifest describes it."""

    query_dimension: int  # d, of the decoder's states
    adapter_dimension: int  # d_o, before PCA; 0: there is no adapter, and states are but scaled to length 1
    pca: bool

    def __str__(self) -> str:
        if not self.adapter_dimension:
            return "unit"
        return f"clknn{self.adapter_dimension}{'+pca' if self.pca else ''}"


@dataclass(frozen=True)
class SourceIndexDescription(Described):
    """The index of the source sentences of a token part, see `datastore.source_index`; of none, until it is written."""

    FILES = SOURCE_FILES

    sentences: int = 0  # numbers of sentences, some of which may have no entries
    known: int = 0  # that have
    subwords: int = 0  # of all of them
    postings: int = 0
    vocabulary: int = 0  # source subwords that the model knows
    unknown: int = 0  # of these the one for all others
    mean_length: float = 1.0  # of a sentence, in subwords; at least 1


@dataclass
class Source:
    """A corpus that was merged into a datastore.

    Token entries of one are neighbours, source by source. Sentences of a phrase datastore may be of several.
    """

    name: str
    corpus: str  # fingerprint
    size: int  # entries
    sentences: int
    share: float  # fraction of its sentences that was drawn
    subsets: dict[str, int] = field(default_factory=dict)  # of tokens
    too_long: int = 0  # sentences longer than the phrase encoder reads
    # fingerprint of the model whose back-translations its sources are; empty: they are none
    reverse_model: str = ""


@dataclass(kw_only=True)
class Section(Described):
    """What all parts of a manifest have; a subclass is one kind of part: what differs is data."""

    PART: ClassVar[str]
    COMMAND: ClassVar[str]  # that builds it
    ORDER: ClassVar[str]  # of the entries in the file
    # Entries that make two parts the same, and that keys in a database must have. Options come before the
    # size, which follows from them: a refusal names the cause.
    IDENTITY: ClassVar[str]
    # Arrays with a row for each entry; the first column of the last one is its sentence.
    ROWS: ClassVar[tuple[str, ...]] = ()
    TOLD_BY: ClassVar[str] = KEYS  # the array whose digest stands for its contents
    KEY_FORM: ClassVar[KeyForm] = FP16
    EFFORT: ClassVar[Effort] = TOKEN_EFFORT  # of an approximate search
    DEPTH: ClassVar[int] = 0  # neighbours that a search asks for, at least

    size: int
    dimension: int
    fingerprints: dict[str, str]  # of what it was built from
    index: IndexDescription = EXACT
    share: float = 1.0  # fraction of the sentences that was drawn at random
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # path -> bytes, sha256
    index_recall: float | None = None  # of `search.recall.recall_of_sample`; None: exact, or unknown
    shard: list[int] | None = None  # its number, of how many, and tokens or sentences of a chunk
    sources: list[Source] = field(default_factory=list)  # of several corpora that were merged
    # digests of its keys before what was learned moved into it
    ancestors: list[str] = field(default_factory=list)
    store: StoreAddress | None = None  # where the keys are, if in a database

    @property
    def generation(self) -> int:
        return len(self.ancestors)

    @property
    def folder(self) -> str:
        """The name of its folder, another of each generation, so that the manifest decides which one counts."""
        return f"{self.PART}-{self.generation}" if self.generation else self.PART

    @property
    def names(self) -> list[str]:
        return [*(one.file for one in self.FILES if one.there(self)), *self.index.files]

    def digest(self, name: str) -> str | None:
        """Return the SHA-256 of one of its files, None where it has none of that name."""
        file = self.files.get(f"{self.folder}/{name}")
        return file["sha256"] if file is not None else None

    @property
    def keys_fingerprint(self) -> str | None:
        """Digest of the keys' file, or of what it would be where a database has them."""
        return self.digest(f"{self.TOLD_BY}.npy") or self.fingerprints.get(KEYS)

    def open_keys(self, folder: Path) -> np.ndarray:
        """Map the keys that are in a folder, as vectors [N, d]."""
        return self.KEY_FORM.decode(self.open_arrays(folder, KEYS)[KEYS])

    def remote_keys(self, timeout: float, token: str = "") -> RemoteKeys:
        assert self.store is not None
        identity = self.entries(self.IDENTITY) | {"index": self.index.factory}
        return RemoteKeys(self.store, self.size, self.dimension, identity, timeout, token)

    def entries(self, names: str) -> dict[str, Any]:
        """Return entries as JSON has them, by names that spaces separate: `ORDER`, or `IDENTITY`."""
        values = asdict(self)
        return {name: values[name] for name in names.split()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Make a section of parsed JSON; ValueError, KeyError or TypeError if it is none."""
        values = _known(cls, data)
        values["sources"] = [Source(**source) for source in values.get("sources", [])]
        values["index"] = IndexDescription(**values["index"])
        nested = {
            "projection": ProjectionDescription,
            "store": StoreAddress,
            "source_index": SourceIndexDescription,
        }
        for name in nested.keys() & values.keys():
            if values[name] is not None:
                values[name] = nested[name](**values[name])
        return cls(**values)


@dataclass(kw_only=True)
class TokenSection(Section):
    """The token part of a manifest.

    Its fingerprints: model, target_dictionary, corpus; adapter, language_pair, reverse_model; keys, if in a
    database.
    """

    PART, COMMAND = TOKEN, "build tokens"
    ORDER = (
        "size dimension key_layer subsets fingerprints index projection share files index_recall shard "
        "sources ancestors store source_index suits"
    )
    IDENTITY = "share shard size dimension key_layer subsets projection fingerprints"
    FILES, ROWS = TOKEN_FILES, (KEYS, VALUES, PROVENANCE)

    key_layer: str
    subsets: dict[str, int]  # name -> sentences; provenance counts sentences through them in this order
    # from the decoder's states to the keys; None: they are the keys
    projection: ProjectionDescription | None = None
    source_index: SourceIndexDescription = SourceIndexDescription()
    # settings by name, measured when it was built; of few tokens none
    suits: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class PhraseSection(Section):
    """The phrase part of a manifest.

    Its fingerprints: encoder, corpus; lexicon; keys, where a database has them, and no file does.
    """

    PART, COMMAND = PHRASE, "build phrases"
    ORDER = (
        "size dimension sentences segmentation encoder fingerprints index files share index_recall pooled "
        "shard sources store ancestors"
    )
    IDENTITY = "dimension segmentation share shard fingerprints sentences size"
    FILES, ROWS = PHRASE_FILES, (KEYS, SPANS)
    EFFORT, DEPTH = PHRASE_EFFORT, PHRASE_DEPTH

    sentences: int
    segmentation: dict[str, Any]
    encoder: str  # where its checkpoint was
    pooled: bool = False  # one entry a string, the mean over all its places


@dataclass(kw_only=True)
class TextSection(Section):
    """The text part of a manifest: counts of n-grams of the model's subwords in text of the target language.

    Its size is in tokens, and the counts are searched by hash, without an index. Its fingerprints:
    target_dictionary, corpus; general, the text it was counted against.
    """

    PART, COMMAND = TEXT, "build text"
    ORDER = "size sentences words order tables general fingerprints index files sources"
    IDENTITY = "words order fingerprints"
    FILES, TOLD_BY = TEXT_FILES, COUNTS

    dimension: int = 0
    sentences: int
    words: int  # of the vocabulary
    order: int  # n of the longest n-grams
    # contexts: rows, prefixes of their hashes, most hashes with one prefix; grams: rows
    tables: dict[str, list[int]]
    general: int = 0  # tokens of general text; 0: none was counted


@dataclass
class Manifest:
    """All of `manifest.json`."""

    token: TokenSection | None = None
    phrase: PhraseSection | None = None
    text: TextSection | None = None
    created_with: str = f"fairseq-ccpr {__version__}"

    @property
    def parts(self) -> list[Section]:
        return [part for part in (self.token, self.phrase, self.text) if part is not None]

    def write(self, directory: Path) -> None:
        """Write atomically: readers see the old manifest or the new one."""
        parts = {part.PART: part.entries(part.ORDER) for part in self.parts}
        data = {"format_version": MANIFEST_VERSION, **parts, "created_with": self.created_with}
        write_checked_json(directory / MANIFEST, data)
        sync_directory(directory)

    @classmethod
    def update(cls, directory: Path, sections: Iterable[tuple[Section | None, Section]]) -> Manifest:
        """Put sections in place of those that they were made from, None for a new part; all others stay.

        Raises:
            DatastoreError: another process has replaced one of these meanwhile; nothing has changed.
        """
        with only_writer(directory / MANIFEST):
            manifest = cls.read(directory) if (directory / MANIFEST).exists() else cls()
            for before, after in sections:
                manifest.refuse_changed(directory, after.PART, before)
                setattr(manifest, after.PART, after)
            manifest.write(directory)
        return manifest

    def refuse_changed(self, directory: Path, part: str, before: Section | None) -> None:
        """Refuse to go on from a section of this datastore that is no longer that of its part."""
        if getattr(self, part) != before:
            raise DatastoreError(
                f"the {part} part of {directory} was built, indexed or compacted by another process "
                "meanwhile, and stays as it is now: run this command again"
            )

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read and check a datastore's manifest; a DatastoreError says why there is none."""
        path = directory / MANIFEST
        if directory.is_file():
            raise DatastoreError(
                f"{directory} is a file, and a datastore is a folder: give the folder that was --output of "
                "fairseq-ccpr build; a model's checkpoint is for --path"
            )
        if not directory.is_dir():
            raise DatastoreError(
                f"there is no datastore at {directory}: no such directory; build one with fairseq-ccpr "
                "build tokens, build phrases or build text"
            )
        if not path.is_file():
            if any(directory.glob(f"*{PARTIAL}")) or any(directory.glob(f"*/{PLAN}")):
                raise DatastoreError(
                    f"the datastore {directory} is unfinished: run the command that was building it again, "
                    "and it resumes"
                )
            near = [*sorted(directory.glob(f"*/{MANIFEST}")), *directory.absolute().parent.glob(MANIFEST)]
            build = "build one with fairseq-ccpr build tokens, build phrases or build text"
            advice = f"did you mean {near[0].parent}?" if near else build
            raise DatastoreError(f"{directory} is not a datastore: it has no {MANIFEST}; {advice}")
        again = "build the datastore again"
        parts = {section.PART: section for section in (TokenSection, PhraseSection, TextSection)}

        def make(data: dict[str, Any]) -> Manifest:
            del data["format_version"]
            values = _known(cls, data)
            for name in parts.keys() & values.keys():
                values[name] = parts[name].from_json(values[name])
            return cls(**values)

        return read_versioned(
            directory,
            "datastore",
            MANIFEST_VERSION,
            again,
            lambda data: bool(parts.keys() & data.keys()),
            make,
        )


def _known(cls: type[Any], data: dict[str, Any]) -> dict[str, Any]:
    """Copy the entries of a dataclass's JSON, none of which may be unknown."""
    if unknown := sorted(data.keys() - {field.name for field in fields(cls)}):
        raise ValueError(f"it has an unknown entry '{unknown[0]}'")
    return dict(data)
