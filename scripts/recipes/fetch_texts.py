"""Fetches and joins the texts of the results that may not be shipped with them: office, office-fr and koran1.

python scripts/recipes/fetch_texts.py office|office-fr|koran1 OUTPUT

It needs apt-get of a Debian 12, downloads to OUTPUT/packages and installs nothing; packages that are there already are used.
Written are NAME.train.tsv, NAME.valid.tsv and NAME.test.tsv: German (office-fr: French), tab, English; and
NAME.mono.en, the English sentences of training, each once. The hash of a pair's place decides whether it is
held out, so these are the same on each machine: benchmarks/texts.sha256 has the checksums of all four, and each
file that differs from it is named. No held-out sentence is in training on either side, and in koran1 no verse of
theirs. The texts keep their owners' licences.

    office    help of LibreOffice, MPL-2.0: its elements are joined by page and id, and divided into sentences where both
              languages have as many; office-fr is the same from French
    koran1    TeX's packages quran and quran-de, joined by verse; the English is Ahmed Ali's alone. Four translators' German
              is in training, Bubenheim's is held out
"""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

from fairseq_ccpr.text.sentences import Segments
from fairseq_ccpr.text.words import has_letters, word_spans

ROOT = Path(__file__).resolve().parent.parent.parent
CHECKSUMS = ROOT / "benchmarks" / "texts.sha256"
Pair = tuple[str, str]
Place = str  # where a pair stands: the same in all its translations

OFFICE = {
    language: (
        f"libreoffice-help-{language.lower()}",
        "4:7.4.7-1+deb12u14",
        re.compile(rf"/help/{language}/(text/.*\.html)$"),
    )
    for language in ("de", "fr", "en-US")
}
TEXLIVE = "2022.20230122-1"
KORAN_GERMAN = (
    "texlive-lang-german",
    TEXLIVE,
    re.compile(r"/quran-de/qurantext-(deii|deiii|deiv)\.translation\.def$"),
)
KORAN = ("texlive-lang-arabic", TEXLIVE, re.compile(r"/quran/qurantext-(de|en)\.translation\.def$"))
HELD_OUT = "deii"  # Bubenheim
SOURCES = {"office": "de", "office-fr": "fr"}
SIZES = {name: {"test": 1500, "valid": 1000} for name in SOURCES} | {
    "koran1": {"test": 690, "valid": 500}
}  # places

TEXT_ELEMENTS = {"p", "h1", "h2", "h3", "h4", "h5", "h6", "li", "td", "th"}
VERSE = re.compile(r"\\qt@newcmd\\qurantrans@\w+@([ivxlcdm]+)\{(.*)\}%?$", re.MULTILINE)
ROMAN = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100, "d": 500, "m": 1000}


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in SIZES:
        sys.exit((__doc__ or "").strip())
    name, output = sys.argv[1], Path(sys.argv[2])
    packages = output / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    train, held_out = office(packages, SOURCES[name]) if name in SOURCES else koran(packages)
    parts = split(train, held_out, SIZES[name])
    files = {f"{part}.tsv": [f"{source}\t{target}" for source, target in parts[part]] for part in parts}
    files["mono.en"] = [*dict.fromkeys(target for _, target in parts["train"])]
    for ending, lines in files.items():
        path = output / f"{name}.{ending}"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{path}: {len(lines):,} lines, {compared(path)}")


def compared(path: Path) -> str:
    """Say whether a file is the one whose checksum is known."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    known = dict(line.split()[::-1] for line in CHECKSUMS.read_text(encoding="utf-8").splitlines())
    if known[path.name] == digest:
        return f"as {CHECKSUMS.name} has it"
    return (
        f"with the checksum {digest} where {CHECKSUMS.name} has {known[path.name]}: figures will differ, "
        f"because a package in {path.parent / 'packages'} has another version"
    )


def office(packages: Path, language: str) -> tuple[dict[Place, list[Pair]], dict[Place, Pair]]:
    """Read the pairs of the office suite's help, by page and id; any of them may be held out."""
    source, english = (
        {
            f"{page}#{number}": text
            for page, content in files_of(fetched(packages, package, version), wanted)
            for number, text in elements(content).items()
        }
        for package, version, wanted in (OFFICE[language], OFFICE["en-US"])
    )
    found = {
        f"{place}.{number}": pair
        for place, text in source.items()
        for number, pair in enumerate(sentences((text, english.get(place, ""))))
    }
    found = {
        place: pair for place, pair in found.items() if all(map(has_letters, pair)) and pair[0] != pair[1]
    }
    return {place: [pair] for place, pair in found.items()}, found


def koran(packages: Path) -> tuple[dict[Place, list[Pair]], dict[Place, Pair]]:
    """Read the pairs of the Quran, by verse; those of one German translator may be held out."""
    texts = {
        translator: verses(content)
        for package, version, wanted in (KORAN, KORAN_GERMAN)
        for translator, content in files_of(fetched(packages, package, version), wanted)
    }
    english = texts.pop("en")
    train = {place: [(german[place], text) for german in texts.values()] for place, text in english.items()}
    return train, {place: (texts[HELD_OUT][place], text) for place, text in english.items()}


def fetched(packages: Path, name: str, version: str) -> Path:
    file = packages / f"{name}_{version.replace(':', '%3a')}_all.deb"  # as apt-get names it
    if not file.is_file():
        try:
            subprocess.run(["apt-get", "download", f"{name}={version}"], cwd=packages, check=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            sys.exit(
                f"apt-get cannot download {name} {version} ({error}): put the package, of Debian 12, there as {file}"
            )
    return file


def files_of(package: Path, wanted: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Read text files of a Debian package; yields the first group of `wanted` in their paths, and their content."""
    content = package.read_bytes()
    if not content.startswith(b"!<arch>\n"):
        sys.exit(f"{package} is no Debian package: delete it, and run this again")
    place = 8
    while place < len(content):
        header = content[
            place : place + 60
        ]  # of a member of an ar archive: name, time, owner, group, mode, size
        size, place = int(header[48:58]), place + 60
        if header.startswith(b"data.tar"):
            with tarfile.open(fileobj=io.BytesIO(content[place : place + size])) as archive:
                for member in archive:
                    match = wanted.search(member.name)
                    if match and (stream := archive.extractfile(member)):
                        yield match[1], stream.read().decode("utf-8")
        place += size + size % 2


def sentences(pair: Pair) -> list[Pair]:
    """Divide a pair into sentences where both sides have as many.

    >>> sentences(("Ja. Nein.", "Yes. No.")), sentences(("Ja. Nein.", "Yes, and no."))
    ([('Ja.', 'Yes.'), ('Nein.', 'No.')], [('Ja. Nein.', 'Yes, and no.')])
    """
    source, target = (Segments.of(text).sentences for text in pair)
    return list(zip(source, target)) if len(source) == len(target) else [pair]


def elements(page: str) -> dict[str, str]:
    """Return the text of a page's elements by their ids; what is in an inner element is not in the outer one."""
    parser = _Elements()
    parser.feed(page)
    parser.close()
    return parser.found


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._open: list[tuple[str, str | None, list[str]]] = []  # tag, id and text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in TEXT_ELEMENTS:
            self._open.append((tag, dict(attrs).get("id"), []))
        elif tag == "br":
            self.handle_data(" ")

    def handle_endtag(self, tag: str) -> None:
        if any(tag == one for one, _, _ in self._open):
            while True:  # elements inside it that were not closed end with it
                name, number, pieces = self._open.pop()
                text = " ".join("".join(pieces).split())
                if number and text:
                    self.found.setdefault(number, text)
                if name == tag:
                    break

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1][2].append(data)


def verses(definitions: str) -> dict[Place, str]:
    r"""Return the verses of a file of TeX's quran by their number in the whole book, from 1.

    >>> verses(r"\qt@newcmd\qurantrans@en@viii{\basmalahen SAY: ``I SEEK refuge''\qt@no{(1)}}" + "\n")
    {'8': 'SAY: "I SEEK refuge"'}
    """
    return {str(roman(number)): plain(text) for number, text in VERSE.findall(definitions)}


def plain(tex: str) -> str:
    text = (
        re.sub(r"\\qt@no\{.*?\}|\\basmalah\w+", "", tex)
        .replace("``", '"')
        .replace("''", '"')
        .replace("`", "'")
    )
    return " ".join(text.split())


def roman(number: str) -> int:
    """Read a Roman numeral.

    >>> roman("mmxxiv"), roman("mcmxcix")
    (2024, 1999)
    """
    values = [ROMAN[letter] for letter in number]
    return sum(-value if value < after else value for value, after in zip(values, [*values[1:], 0]))


def split(
    train: dict[Place, list[Pair]], held_out: dict[Place, Pair], sizes: dict[str, int]
) -> dict[str, list[Pair]]:
    """Divide pairs, in the order of their places' hashes; those of training with a side that is held out are left out."""
    order = sorted(held_out, key=lambda place: hashlib.sha256(place.encode()).hexdigest())
    parts: dict[str, list[Pair]] = {}
    taken: set[str] = set()
    known: tuple[set[str], set[str]] = set(), set()
    for part, size in sizes.items():
        here = order[:size]
        order = order[size:]
        taken.update(here)
        parts[part] = fresh((held_out[place] for place in here), known)
        for side in (0, 1):
            known[side].update(folded(pair[side]) for pair in parts[part])
    rest = [pair for place in train if place not in taken for pair in train[place]]
    parts["train"] = fresh(rest, known)
    return parts


def fresh(pairs: Iterable[Pair], known: tuple[set[str], set[str]]) -> list[Pair]:
    return [
        pair
        for pair in dict.fromkeys(pairs)
        if not any(folded(text) in texts for text, texts in zip(pair, known))
    ]


def folded(text: str) -> str:
    """Return the words of a text, without case.

    >>> folded("Open, the FILE!")
    'open the file'
    """
    words = (text[start:end] for start, end in word_spans(text))
    return " ".join(word.casefold() for word in words if any(map(str.isalnum, word)))


if __name__ == "__main__":
    main()
