"""`fairseq-ccpr build memory`: an empty datastore to learn into."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from fairseq_ccpr.building.empty_store import EmptyStore, one_model
from fairseq_ccpr.cli.command import command
from fairseq_ccpr.datastore.preprocessing import remember
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.models.key_layer import KEY_LAYERS
from fairseq_ccpr.settings import option

HELP = """\
Make an empty token datastore: fairseq-ccpr learn adds sentence pairs, one or many at a time, each of which counts from the
next translation on.

  fairseq-ccpr build memory --path model.pt --output datastores/mine

It stores model, languages, dictionaries and subwords. If there is text of the domain, build from that instead (fairseq-ccpr
build tokens), and learn in addition. A datastore of phrases alone, which cannot learn without tokens, gets an empty token
part.
"""


@dataclass
class Options:
    """The command's own options."""

    output: Path = option(help="the datastore: a folder that does not exist, or one of phrases alone", metavar="DIR")
    key_layer: str = option(KEY_LAYERS[0], "the decoder state that becomes the key", choices=KEY_LAYERS)
    data: Optional[Path] = option(
        None, "folder with the model's dictionaries (found next to the model)", metavar="DATA_BIN"
    )


def build_memory(options: Options, rest: list[str]) -> int:
    """Make it, and say so."""
    system = System.of(rest, options.data)
    symbols = system.task.target_dictionary.symbols
    languages = system.task.tags.languages
    section = EmptyStore(one_model(system.models), symbols, options.key_layer, languages).write(options.output)
    remember(system.preprocessing, options.output)
    print(f"{options.output}: nothing yet, for entries of width {section.dimension}; fairseq-ccpr learn adds to it")
    return 0


main = command(HELP, build_memory, Options, rest=True)
