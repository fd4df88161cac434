"""Languages as clients name them: by codes, with English names to show."""

from __future__ import annotations

_NAMES = """
af Afrikaans|ar Arabic|az Azerbaijani|be Belarusian|bg Bulgarian|bn Bengali|bs Bosnian|ca Catalan|cs Czech
cy Welsh|da Danish|de German|el Greek|en English|eo Esperanto|es Spanish|et Estonian|eu Basque|fa Persian
fi Finnish|fr French|ga Irish|gl Galician|gu Gujarati|he Hebrew|hi Hindi|hr Croatian|hu Hungarian|hy Armenian
id Indonesian|is Icelandic|it Italian|ja Japanese|ka Georgian|kk Kazakh|km Khmer|kn Kannada|ko Korean
ky Kyrgyz|la Latin|lt Lithuanian|lv Latvian|mk Macedonian|ml Malayalam|mn Mongolian|mr Marathi|ms Malay
my Burmese|nb Norwegian Bokmål|ne Nepali|nl Dutch|nn Norwegian Nynorsk|no Norwegian|pa Punjabi|pl Polish
ps Pashto|pt Portuguese|ro Romanian|ru Russian|si Sinhala|sk Slovak|sl Slovenian|so Somali|sq Albanian
sr Serbian|sv Swedish|sw Swahili|ta Tamil|te Telugu|th Thai|tl Tagalog|tr Turkish|uk Ukrainian|ur Urdu
uz Uzbek|vi Vietnamese|xh Xhosa|yo Yoruba|zh Chinese|zu Zulu
"""
NAMES = dict(one.split(" ", 1) for line in _NAMES.split("\n") if line for one in line.split("|"))


def bare(code: str) -> str:
    """Return the code of a language without script and country, as models of many languages have it: `de_DE` is `de`.

    >>> bare("pt-BR"), bare("zh_Hans"), bare("EN")
    ('pt', 'zh', 'en')
    """
    return code.replace("_", "-").partition("-")[0].casefold()


def name_of(code: str) -> str:
    """Return the English name of a language; its code where none is known here.

    >>> name_of("de_DE"), name_of("xx")
    ('German', 'xx')
    """
    return NAMES.get(bare(code), code)
