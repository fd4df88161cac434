"""Languages, however models, files and clients name them: `de`, `de-AT`, `de_DE`, `deu`, `ger` or `deu_Latn`.

Countries make no other language, scripts do: zh-Hans and zh-CN are zh, zh-Hant and zh-TW are not. A code
without a script has that in which the language is mostly written (Unicode's likely subtags). Names of
languages are in this table, for `langcodes` needs a package of several megabytes for them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.words import word_spans

_NAMES = """
af Afrikaans|ar Arabic|az Azerbaijani|be Belarusian|bg Bulgarian|bn Bengali|bs Bosnian|ca Catalan|cs Czech
cy Welsh|da Danish|de German|el Greek|en English|eo Esperanto|es Spanish|et Estonian|eu Basque|fa Persian
fi Finnish|fr French|ga Irish|gl Galician|gu Gujarati|he Hebrew|hi Hindi|hr Croatian|hu Hungarian|hy Armenian
id Indonesian|is Icelandic|it Italian|ja Japanese|ka Georgian|kk Kazakh|km Khmer|kn Kannada|ko Korean
ky Kyrgyz|la Latin|lt Lithuanian|lv Latvian|mk Macedonian|ml Malayalam|mn Mongolian|mr Marathi|ms Malay
my Burmese|nb Norwegian|ne Nepali|nl Dutch|nn Norwegian Nynorsk|pa Punjabi|pl Polish
ps Pashto|pt Portuguese|ro Romanian|ru Russian|si Sinhala|sk Slovak|sl Slovenian|so Somali|sq Albanian
sr Serbian|sr-Latn Serbian (Latin)|sv Swedish|sw Swahili|ta Tamil|te Telugu|th Thai|tl Tagalog|tr Turkish|uk Ukrainian|ur Urdu
uz Uzbek|vi Vietnamese|xh Xhosa|yo Yoruba|zh Chinese|zh-Hant Chinese (traditional)|zu Zulu
"""
logger = logging.getLogger(__name__)
NAMES = dict(one.split(" ", 1) for line in _NAMES.split("\n") if line for one in line.split("|"))


LANGUAGE_PAIR = "language_pair"  # a fingerprint of datastores whose model knows several
EXCHANGED = 0.8  # fraction of pairs, of which single ones may be names, numbers or copies
IDENTIFIED_LINES, ENOUGH_LINES = 200, 10  # lines whose languages are identified, and how many say something
COPIED_WORDS, COPIED_SURELY = 3, 0.95  # of a copy: names and terms have fewer, or are of no language for sure

# `no` is nearly always Bokmål, `zt` and `tl` are LibreTranslate's, and NLLB's script of Korean is without
# Hanja.
_ALIASES = {"no": "nb", "zt": "zh-Hant", "fil": "tl", "ko-Hang": "ko"}


@dataclass(frozen=True)
class LanguageTags:
    """The symbols in a model's sentences that are not text.

    Attributes:
        symbols: all tags of its dictionaries, such as __de__ or [de_DE]. They are written to no text.
        added: how many the task adds to a source sentence.
        begin: the tag that decoding forces at the beginning of target sentences.
        end: the tag that ends target sentences in place of </s>, which stands before it in training.
        languages: "de-en", where one model knows several; a datastore is for one of them.
    """

    symbols: frozenset[str] = frozenset()
    added: int = 0
    begin: str | None = None
    end: str | None = None
    languages: str | None = None

    @property
    def forced(self) -> int:
        """Count the tokens that decoding forces at the beginning: no keys, and nothing is searched for."""
        return int(self.begin is not None)

    def ids(self, dictionary: Any) -> frozenset[int]:
        """Return those that a dictionary has."""
        return frozenset(dictionary.index(symbol) for symbol in self.symbols if symbol in dictionary)

    def end_of(self, dictionary: Any) -> int:
        """Return the token that ends target sentences."""
        return int(dictionary.eos() if self.end is None else dictionary.index(self.end))

    def tagged(self, tokens: Tensor, dictionary: Any) -> Tensor:
        """Return a target sentence's tokens, int64 [L], with its tags, as in training."""
        before, after = (
            tokens.new_tensor([dictionary.index(tag)] if tag is not None else [])
            for tag in (self.begin, self.end)
        )
        return torch.cat([before, tokens, after])


@lru_cache(1 << 12)
def language_code(name: str) -> str:
    """Return the shortest code of a language: no country, and no script where it is the usual one.

    >>> [language_code(one) for one in ("de_DE", "deu_Latn", "zho_Hans", "zh-TW", "iw", "cmn", "arb_Arab", "source")]
    ['de', 'de', 'zh', 'zh-Hant', 'he', 'zh', 'ar', 'source']
    """
    import langcodes  # here, as its tables take long to load

    try:
        given = langcodes.get(name).prefer_macrolanguage()
    except ValueError:  # a name that somebody made up
        return name.replace("_", "-").casefold()
    language, script = str(given.language), given.maximize().script
    usual = langcodes.get(language).maximize().script
    code = language if script == usual else f"{language}-{script}"
    return _ALIASES.get(code, code)


def script_of(name: str) -> str:
    """Return the script of a language by ISO 15924; empty where the name is that of no language.

    >>> [script_of(one) for one in ("zho_Hant", "jpn", "ko_KR", "my", "source", "")]
    ['Hant', 'Jpan', 'Kore', 'Mymr', '', '']
    """
    import langcodes

    try:
        return langcodes.get(language_code(name)).maximize().script or ""
    except ValueError:
        return ""


def same_language(one: str, other: str) -> bool:
    """Tell whether two names are of one language, in one script.

    >>> same_language("de-AT", "DE"), same_language("en_GB", "eng_Latn"), same_language("de", "den")
    (True, True, False)
    >>> same_language("zh-CN", "zho_Hans"), same_language("zh", "zh-TW"), same_language("sr-Latn", "sr-Cyrl")
    (True, False, False)
    """
    return language_code(one) == language_code(other)


@lru_cache(4)
def _identifier(*names: str) -> Any:
    """Return what identifies one of these languages, or any; None where it does not know one."""
    from py3langid import langid  # here, as few commands need it

    identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
    try:
        identifier.set_languages([_identified(one) for one in names] or None)
    except ValueError:
        return None
    return identifier


def _identified(name: str) -> str:
    language = language_code(name).partition("-")[0]
    return {"nb": "no"}.get(language, language)


def identify(text: str) -> str:
    """Name the language that a text seems to be in."""
    _identifier().set_languages(None)
    return str(_identifier().classify(text)[0])


def look_exchanged(pairs: Iterable[tuple[str, str]], source: str, target: str) -> bool:
    """Tell whether nearly all sources are in the target language, and the targets in the source's.

    >>> pairs = [("This is a sentence in English.", "Das ist ein Satz auf Deutsch.")]
    >>> look_exchanged(pairs, "de_DE", "eng_Latn"), look_exchanged(pairs, "en", "de"), look_exchanged(pairs, "xx", "de")
    (True, False, False)
    """
    languages, identifier = [_identified(one) for one in (source, target)], _identifier(source, target)
    if identifier is None or languages[0] == languages[1]:
        return False
    found = [[identifier.classify(side)[0] for side in pair] == languages[::-1] for pair in pairs]
    return sum(found) > EXCHANGED * len(found)


def refuse_exchanged(where: str, pairs: Sequence[tuple[str, str]], source: str, target: str) -> None:
    """Refuse sentence pairs whose columns look exchanged, if they are enough to tell."""
    if len(pairs) >= ENOUGH_LINES and look_exchanged(pairs, source, target):
        raise ConfigurationError(
            f"{where} has {language_name(target)} before {language_name(source)}, and the source language is "
            f"{source}: exchange the two columns, or files"
        )


def look_copied(source: str, target: str, source_lang: str, target_lang: str) -> bool:
    """Tell whether a target is its source once more, several words that are surely of the source language.

    >>> [look_copied(one, one, "de", "en") for one in ("Die Tür klemmt.", "Ludwig van Beethoven", "Computer")]
    [True, False, False]
    """
    if " ".join(source.split()).casefold() != " ".join(target.split()).casefold():
        return False
    if len(word_spans(source)) < COPIED_WORDS or same_language(source_lang, target_lang):
        return False
    identifier = _identifier(source_lang, target_lang)
    if identifier is None:
        return False
    language, probability = identifier.classify(source)
    return bool(language == _identified(source_lang) and probability >= COPIED_SURELY)


def look_foreign(lines: Sequence[str], expected: str) -> str:
    """Return the language of nearly all of a text, if not the expected one; otherwise nothing.

    >>> look_foreign(["Das ist ein Satz auf Deutsch.", "Hier ist noch einer."] * 5, "en_GB")
    'de'
    """
    if len(lines) < ENOUGH_LINES:  # before half a second for what identifies them
        return ""
    identifier, language = _identifier(), _identified(expected)
    if language not in identifier.nb_classes:
        return ""
    # one line says little
    parts = [" ".join(lines[first : first + ENOUGH_LINES]) for first in range(0, len(lines), ENOUGH_LINES)]
    found = [identifier.classify(part)[0] for part in parts]
    most = max(found, key=found.count)
    return most if most != language and found.count(most) > EXCHANGED * len(found) else ""


@cache
def tell_foreign(path: Path, expected: str) -> None:
    """Warn, once, if a text, a sentence per line, looks as if it were in another language."""
    if path.is_file() and (found := look_foreign(list(islice(read_lines(path), IDENTIFIED_LINES)), expected)):
        logger.warning(
            "%s looks %s, where %s is expected: give text of that",
            path,
            language_name(found),
            language_name(expected),
        )


def as_bcp47(name: str) -> str:
    """Return the tag of a language in XML and HTML, with its country; the name itself where it is none.

    >>> as_bcp47("deu_Latn"), as_bcp47("zho_Hant"), as_bcp47("de_at"), as_bcp47("source")
    ('de', 'zh-Hant', 'de-AT', 'source')
    """
    import langcodes

    try:
        return langcodes.standardize_tag(name, macro=True)
    except ValueError:
        return name


def language_name(name: str) -> str:
    """Return the English name of a language, or the name given if it is unknown.

    >>> language_name("de_DE"), language_name("zho_Hant"), language_name("xx")
    ('German', 'Chinese (traditional)', 'xx')
    """
    code = language_code(name)
    return NAMES.get(code, NAMES.get(code.partition("-")[0], name))
