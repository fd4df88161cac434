"""Languages, however models, files and clients name them: `de`, `de-AT`, `de_DE`, `deu`, `ger` or `deu_Latn`.

Countries make no other language, scripts do: zh-Hans and zh-CN are zh, zh-Hant and zh-TW are not. A code without a script has
that in which the language is mostly written (Unicode's likely subtags). Names of languages are in this table, for
`langcodes` needs a package of several megabytes for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any

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
NAMES = dict(one.split(" ", 1) for line in _NAMES.split("\n") if line for one in line.split("|"))


EXCHANGED = 0.8  # fraction of pairs, of which single ones may be names, numbers or copies

# `no` is nearly always Bokmål, `zt` and `tl` are LibreTranslate's, and NLLB's script of Korean is without Hanja.
_ALIASES = {"no": "nb", "zt": "zh-Hant", "fil": "tl", "ko-Hang": "ko"}


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
    """Return the script that a language is written in, by ISO 15924; empty where the name is that of no language.

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


@cache
def _identifier() -> Any:
    from py3langid import langid  # here, as few commands need it

    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE)


def identify(text: str) -> str:
    """Name the language that a text seems to be in."""
    _identifier().set_languages(None)
    return str(_identifier().classify(text)[0])


def look_exchanged(pairs: Iterable[tuple[str, str]], source: str, target: str) -> bool:
    """Tell whether nearly all sources of sentence pairs are in the target language, and the targets in the source language.

    >>> pairs = [("This is a sentence in English.", "Das ist ein Satz auf Deutsch.")]
    >>> look_exchanged(pairs, "de_DE", "eng_Latn"), look_exchanged(pairs, "en", "de"), look_exchanged(pairs, "xx", "de")
    (True, False, False)
    """
    languages = [language_code(one).partition("-")[0] for one in (source, target)]
    try:
        _identifier().set_languages(languages)  # one of the two
    except ValueError:  # it does not know one of them
        return False
    found = [[_identifier().classify(side)[0] for side in pair] == languages[::-1] for pair in pairs]
    return languages[0] != languages[1] and sum(found) > EXCHANGED * len(found)


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


def name_of(name: str) -> str:
    """Return the English name of a language, or the name given if it is unknown.

    >>> name_of("de_DE"), name_of("zho_Hant"), name_of("xx")
    ('German', 'Chinese (traditional)', 'xx')
    """
    code = language_code(name)
    return NAMES.get(code, NAMES.get(code.partition("-")[0], name))
