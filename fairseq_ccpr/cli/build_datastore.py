"""`build_datastore.py`: build a datastore from a corpus."""

from __future__ import annotations

import argparse
import time
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from fairseq_ccpr.building.adapter_build import PCA_DIMENSION, build_projected_datastore
from fairseq_ccpr.building.distributed import launched
from fairseq_ccpr.building.phrase_build import PhraseBuildSettings, build_phrase_datastore
from fairseq_ccpr.building.token_build import NO_ADAPTER, TokenBuildSettings, build_token_datastore
from fairseq_ccpr.cli.command import HelpFormatter, own_arguments, run
from fairseq_ccpr.models.key_layer import KEY_LAYERS
from fairseq_ccpr.models.phrase_finder import KINDS
from fairseq_ccpr.search import METRICS, SLOW
from fairseq_ccpr.storage.fingerprint import short

TOKENS_HELP = """\
Build a token datastore: force-decode the sentence pairs of DATA_BIN with a trained model and keep, for every target
token, the decoder's state as its key.

  build_datastore.py tokens data-bin --path model.pt -s de -t en --output datastores/mine

--adapter clknn goes on: it trains a small network on those keys by contrast (CLKNN) and stores what that makes of them,
narrower, and made for finding the right token. Decoding needs no other options for it.

Run the same command again after a kill and it goes on where it was; on a finished datastore, another --index makes only
the index anew. Several processes share the work: torchrun --nproc-per-node 4 scripts/build_datastore.py tokens ...
"""


PHRASES_HELP = """\
Build a phrase datastore from text of the target language alone: find the phrases of each sentence with a trained phrase
encoder and keep a vector of each and its place.

  build_datastore.py phrases mono.en.txt --encoder ccpr/phrase-encoder/ccpr.pt --output datastores/mine
  build_datastore.py phrases mono.en.txt --encoder xpr/phrase-encoder/xpr.pt --segmentation lexicon:dictionary.tsv \
    --output datastores/types

With a CCPR encoder each phrase of each sentence is an entry. With an XPR encoder each string is one, its vector the mean
over all its sentences, of which the first is kept. XPR cannot tell phrases from other words, so give it a lexicon: word spans
that FILE names, one a line or with tabs between them. A dictionary of both languages serves for source sentences as well.

The text has a sentence a line, plain, .gz or .xz; the same sentence counts once. The output may hold a token part
already. Run the same command again after a kill and it goes on where it was.

  build_datastore.py phrases mono.en.txt --encoder ccpr.pt --output datastores/mine --store http://localhost:19530

--store brings the keys into Milvus and keeps the rest in the folder, which is used as before. Credentials, user:password or
an API key, are taken from the URI or, better, from the environment variable MILVUS_TOKEN, where decoding looks for them too.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="build_datastore.py", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    _add_tokens(parts)
    _add_phrases(parts)
    return parser


def _defaults(settings: type[Any]) -> dict[str, Any]:
    """Of a dataclass, by name."""
    return {f.name: f.default_factory() if f.default_factory is not MISSING else f.default for f in fields(settings)}


def _add_phrases(parts: Any) -> None:
    phrases = parts.add_parser(
        "phrases",
        help="from target-language text, for CCPR and XPR",
        description=PHRASES_HELP,
        formatter_class=HelpFormatter,
    )
    default = _defaults(PhraseBuildSettings)
    add = phrases.add_argument
    add("text", nargs="+", type=Path, metavar="TEXT", help="files of one sentence a line")
    add(
        "--encoder",
        required=True,
        type=Path,
        metavar="CKPT",
        help="checkpoint of fairseq-train --task phrase_contrast or phrase_lexicon",
    )
    add("--output", required=True, type=Path, metavar="DIR", help="the datastore: a new folder, or one to add to")
    _add_share(phrases, default, "sentences")
    _add_shards(phrases, default)
    add(
        "--segmentation",
        default=default["segmentation"],
        metavar=KINDS,
        help="which spans of words are phrases: what the encoder takes for one, all, those of N words, or those that a file "
        "names (learned; all with XPR)",
    )
    add("--threshold", type=float, default=default["threshold"], metavar="P", help="probability above which it does")
    add("--max-words", type=int, default=default["max_words"], metavar="N", help="words of a phrase, at most")
    add(
        "--index",
        default=default["index"],
        metavar="exact|torch-ivf|FACTORY",
        help="exact search, inverted lists in torch, or a FAISS factory string; disk, or disk:FACTORY, for one whose "
        "inverted lists stay on disk; auto takes exact on a GPU and for small stores",
    )
    add("--index-parameters", default=default["index_parameters"], metavar="P=V,...", help="search parameters")
    add(
        "--store",
        metavar="URI|FILE.db",
        help="keep the keys in Milvus: a server, or a file of the embedded one; --index and --index-parameters are then "
        "exact or types and parameters of Milvus (HNSW,M=16,efConstruction=200 and ef=128)",
    )
    add("--collection", metavar="NAME", help="of Milvus (the name of the output folder)")
    add(
        "--store-timeout",
        type=float,
        default=default["store_timeout"],
        metavar="S",
        help=f"seconds that Milvus may take to answer, all attempts together; {SLOW} times as long to write",
    )
    add(
        "--shard-sentences",
        type=int,
        default=default["shard_sentences"],
        metavar="N",
        help="a kill loses at most so many sentences' work",
    )
    add("--bf16", action="store_true", help="run the encoder in bfloat16, faster where the processor has it")
    add("--cpu", action="store_true", help="use the CPU even where there is a GPU")
    add("--quiet", action="store_true", help="no progress bars")


def _add_share(parser: Any, default: dict[str, Any], what: str) -> None:
    text = f"take a random share of the {what}; a larger share holds a smaller one"
    parser.add_argument("--share", type=float, default=default["share"], metavar="X", help=text)


def _add_shards(parser: Any, default: dict[str, Any]) -> None:
    parser.add_argument(
        "--num-shards", type=int, default=default["num_shards"], metavar="N",
        help="build one of N parts, each a datastore, by as many commands on any machines; merge_datastores.py joins them",
    )  # fmt: skip
    parser.add_argument("--shard-id", type=int, default=default["shard_id"], metavar="I", help="which of them, from 0")


def _add_tokens(parts: Any) -> None:
    tokens = parts.add_parser(
        "tokens", help="from sentence pairs, for kNN-MT", description=TOKENS_HELP, formatter_class=HelpFormatter
    )
    default = _defaults(TokenBuildSettings)
    add = tokens.add_argument
    add("data_bin", metavar="DATA_BIN", type=Path, help="folder that fairseq-preprocess wrote")
    add("--path", required=True, metavar="MODEL", help="checkpoint of the one model the datastore is for")
    add("-s", "--source-lang", required=True, metavar="LANG", help="source language")
    add("-t", "--target-lang", required=True, metavar="LANG", help="target language")
    add(
        "--output",
        required=True,
        type=Path,
        metavar="DIR",
        help="the datastore: a new or empty folder, or one to go on with",
    )
    add("--subset", nargs="+", default=default["subset"], metavar="NAME", help="subsets of DATA_BIN to build from")
    _add_share(tokens, default, "sentence pairs")
    _add_shards(tokens, default)
    add("--key-layer", choices=KEY_LAYERS, default=default["key_layer"], help="the decoder state that becomes the key")
    add("--metric", choices=METRICS, help="nearness: squared distance or inner product (l2; with an adapter ip)")
    add(
        "--index",
        default=default["index"],
        metavar="exact|torch-ivf|FACTORY",
        help=(
            "exact search, inverted lists in torch (torch-ivf4096: so many), or a FAISS factory string such as "
            "IVF2048,SQfp16; disk, or disk:FACTORY, for one whose inverted lists stay on disk; auto takes exact on a GPU "
            "and for small stores"
        ),
    )
    add(
        "--index-parameters",
        default=default["index_parameters"],
        metavar="P=V,...",
        help=("search parameters such as nprobe=32, stored with the index; those that suit it if not given"),
    )
    add(
        "--adapter",
        default=default["adapter"],
        metavar="clknn|FILE|none",
        help=(
            "clknn: train an adapter on the keys and store what it makes of them; FILE: use one trained elsewhere "
            "(checkpoint of fairseq-train --task token_contrast); none: the decoder's own states"
        ),
    )
    add(
        "--adapter-options",
        default=default["adapter_options"],
        metavar="STRING",
        help="options of fairseq-train for the adapter's training, in one string, such as '--max-update 5000 --positives 4'",
    )
    add(
        "--pca-dim",
        type=int,
        metavar="N",
        help=f"width of the keys after PCA of the adapter's vectors ({PCA_DIMENSION}, or what they have if less); 0: no PCA",
    )
    add(
        "--normalize-before-pca", action="store_true", help="scale the adapter's vectors to length 1 before PCA as well"
    )
    add(
        "--raw-datastore",
        type=Path,
        metavar="DIR",
        help="where the decoder's own states are, or go, for the adapter to start from; it is kept (default: in --output)",
    )
    add("--keep-raw-keys", action="store_true", help="keep those in --output/raw when all is done")
    add(
        "--valid-subset",
        metavar="NAME",
        help="subset of DATA_BIN by whose retrieval accuracy the best adapter is chosen (valid, where there is one; "
        "without one, some sentences are held out)",
    )
    add("--max-tokens", type=int, default=default["max_tokens"], metavar="N", help="tokens in a batch, as in fairseq")
    add(
        "--shard-tokens",
        type=int,
        default=default["shard_tokens"],
        metavar="N",
        help="a kill loses at most so many tokens' work",
    )
    add("--fp16", action="store_true", help="run the model in half precision")
    add("--cpu", action="store_true", help="use the CPU even where there is a GPU")
    add(
        "--user-dir",
        default=default["user_dir"],
        metavar="DIR",
        help="your own fairseq plug-in, if the model needs one",
    )
    add("--quiet", action="store_true", help="no progress bars")


def build_tokens(settings: TokenBuildSettings) -> int:
    """Build, and say what came of it."""
    settings.check()
    start = time.monotonic()
    with launched() as processes:
        build = build_token_datastore if settings.adapter == NO_ADAPTER else build_projected_datastore
        section, left_out = build(settings, processes)
        if processes.first:
            print(
                f"{settings.output}: {section.size:,} entries of width {section.dimension}, index {section.index}, "
                f"model {short(section.fingerprints['model'])}, {time.monotonic() - start:.0f} s"
            )
            if left_out:
                print(f"{left_out:,} sentences longer than the model takes were left out")
    return 0


def build_phrases(settings: PhraseBuildSettings) -> int:
    """Build, and say what came of it."""
    settings.check()
    start = time.monotonic()
    with launched() as processes:
        report = build_phrase_datastore(settings, processes)
    if report is None:
        return 0
    section, lines = report.section, report.lines
    speed = f" ({report.found_in / report.seconds:.0f} sentences/s)" if report.found_in else ""
    print(
        f"{settings.output}: {section.size:,} phrases of {section.sentences:,} sentences "
        f"({section.size / section.sentences:.1f} a sentence), width {section.dimension}, index {section.index}, "
        f"encoder {short(section.fingerprints['encoder'])}, {time.monotonic() - start:.0f} s{speed}"
    )
    if lines.empty or lines.repeated:
        print(f"{lines.empty:,} empty lines and {lines.repeated:,} repeated sentences were left out")
    if report.too_long:
        print(f"{report.too_long:,} sentences longer than the encoder takes have no phrases")
    return 0


def main() -> None:
    """Parse, build, print."""
    options = vars(make_parser().parse_args(own_arguments()))
    if options.pop("part") == "tokens":
        run("build_datastore.py", lambda: build_tokens(TokenBuildSettings(**options)))
    else:
        run("build_datastore.py", lambda: build_phrases(PhraseBuildSettings(**options)))


if __name__ == "__main__":
    main()
