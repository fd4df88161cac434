"""The server's functions: LibreTranslate's API, and those that it lacks: learning, forgetting, explaining."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote
from uuid import uuid4

from starlette.datastructures import UploadFile
from starlette.responses import FileResponse, Response, StreamingResponse

from fairseq_ccpr.datastore.learned import Learned, LearnedPair
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.errors import CcprError, ConfigurationError, installing
from fairseq_ccpr.evaluation.explain import encode_sentences, explain_encoded, matches_of
from fairseq_ccpr.evaluation.explanation import Explanation, changes, joined
from fairseq_ccpr.inference.alignment import with_markup
from fairseq_ccpr.inference.learning import as_tmx, count_learned, learned_for
from fairseq_ccpr.inference.system import SESSION, Session, Translation, encode
from fairseq_ccpr.server import parameters as given
from fairseq_ccpr.server.access import Limits
from fairseq_ccpr.server.parameters import OPENED, OWNER, Parameters, bad
from fairseq_ccpr.server.work import ROUND_SENTENCES, BusyError, Work
from fairseq_ccpr.storage.files import atomic_file
from fairseq_ccpr.text.formats import EXTRA, FORMATS, open_document, usable
from fairseq_ccpr.text.html import Page
from fairseq_ccpr.text.languages import language_code, language_name, same_language
from fairseq_ccpr.text.sentences import Mark, Parts, Segments, with_marks
from fairseq_ccpr.text.translation_memory import Pair, read_memory
from fairseq_ccpr.translator import Translator

AUTO = "auto"
TEXT, HTML = "text", "html"
KEPT = "ignore_tags"  # DeepL's parameter: elements whose text stays as it is
# bytes of a file: at least, as a multiple, at most
LEAST_UNPACKED, PACKING, MOST_UNPACKED = 1 << 22, 100, 1 << 30
PORTION, MOST_IN_FILE = 256, 50_000  # sentences of a document that wait at once, and that it may have
MINUTES_KEPT, MOST_FILES = 30, 256  # of translated files
EXPLAINED = 4  # sentences that are explained in a round, at most: each takes several times as long
NEIGHBOURS = 16  # that are kept of each token
MOST_PAIRS = 100  # of the memory that one answer has unless asked for more
MOST_OF_SESSION = 2000  # pairs, replaced ones among them

T = TypeVar("T")
Divide = Callable[[str], Segments]


class Finished(NamedTuple):
    """What a sentence is answered with: its translation, all with the markup of the source, and what is like it."""

    best: Translation
    texts: list[str | Parts]
    matches: list[dict[str, Any]]


@dataclass(frozen=True)
class Finish:
    """Makes of translations what is answered, in the thread of the translator."""

    marks: Sequence[list[Mark]] = ()  # the markup of each sentence, if any
    strict: bool = True  # whether one without a translation refuses the request; otherwise it stays
    several: bool = False  # whether the next best translations are wanted as well
    rated: bool = False
    matches: int = 0  # of sentences of the memories that are most like each

    def __call__(self, translator: Translator, first: int, found: list[Translation]) -> list[Finished]:
        for one in found if self.strict else ():
            if one.fault:
                raise bad(f"the sentence {one.source[:40]!r} … has no translation: {one.fault}")
        found = list(map(translator.rated, found)) if self.rated else found
        ranked = [[one, *one.alternatives] if self.several else [one] for one in found]
        marked = with_markup(translator, ranked, self.marks[first:] or [[] for _ in found])
        alike = [self._matches(translator, one.source) for one in found]
        return [Finished(*each) for each in zip(found, marked, alike)]

    def _matches(self, translator: Translator, source: str) -> list[dict[str, Any]]:
        members = translator.members if self.matches else ()
        each = (matches_of(one, source) or [] for one in members)
        best = sorted(chain.from_iterable(each), key=lambda match: -match.likeness)[: self.matches]
        return [asdict(match) | {"changes": changes(match.source, source)} for match in best]


class Service:
    """Answers the requests; only this may use the translator from now on, in its thread, or to encode text."""

    def __init__(self, translator: Translator, limits: Limits) -> None:
        self.work, self.limits, self.stopping = Work(translator), limits, Event()
        task = translator.cfg.task
        self.source, self.target = task.source_lang, task.target_lang
        self._fitting = partial(Segments.fitting, fits=translator.fits)
        memories = {name: (one.ensemble or one.alone).memories for name, one in translator.named.items()}
        self.names, self.sessions = [*memories], len(translator.models) == 1
        self.memories = [one.name for one in next(iter(memories.values())) if one.acts_on == "vote"]
        self.learns = any(one.name == TokenMemory.name for own in memories.values() for one in own)
        self.explains = any(own and not any(one.unscored for one in own) for own in memories.values())
        self.files, self._explaining = TemporaryDirectory(), asyncio.Lock()

    def of_page(self) -> dict[str, Any]:
        return {
            "source_language": language_code(self.source), "target_language": language_code(self.target),
            "names": {"source": language_name(self.source), "target": language_name(self.target)},
            "memories": self.memories, "explains": self.explains, "learns": self.learns,
            "several": len(self.names) > 1, "key": bool(self.limits.keys),
            "most_characters": self.limits.most_characters, "score_name": "", "texts": [],
        }  # fmt: skip

    # ---- LibreTranslate's

    async def translate(self, asked: Parameters) -> dict[str, Any]:
        several, kind = isinstance(asked.get("q"), list), given.text(asked, "format", 20, TEXT)
        if kind not in (TEXT, HTML):
            raise bad(f"the format {kind} is not known: {TEXT} or {HTML}")
        texts = given.texts(asked, "q", self.limits.most_characters)
        alternatives = given.number(asked, "alternatives", 0)
        least = given.share(asked, "min_confidence")
        rated = given.flag(asked, "confidence") or least > 0
        if self._copies(asked):
            found = [[text] for text in texts]
            confidences, divided = list[float | None]([1.0] * len(texts)), [0] * len(texts)
        else:
            self._check_languages(asked)
            kept, memory = given.names(asked, KEPT), self._memory(asked)
            divide = partial(Page.of, kept=kept) if kind == HTML else Segments.of
            if rated:
                await self._call(Translator.check_confidence, memory)
            found, confidences, divided = await self._translated(texts, divide, alternatives, memory, rated)
        found = [one if (sure or 0) >= least else [""] for one, sure in zip(found, confidences)]
        answer: dict[str, list[Any]] = {"translatedText": [texts[0] for texts in found]}
        if alternatives:
            answer["alternatives"] = [texts[1:] for texts in found]
        if rated:
            answer["confidence"] = confidences
        if any(divided):
            answer["divided"] = divided
        if asked.get("source") == AUTO:
            answer["detectedLanguage"] = [self._detected(100.0)] * len(found)
        return answer if several else {name: each[0] for name, each in answer.items()}

    async def sentences(self, asked: Parameters) -> dict[str, Any]:
        """Translate `q`, and tell its sentences apart: what is before each, and the pair learned for it."""
        memory, alternatives = self._memory(asked), given.number(asked, "alternatives", 0)
        (text,) = await self._divided([given.text(asked, "q", self.limits.most_characters)], self._fitting)
        rated, matches = given.flag(asked, "confidence"), given.number(asked, "matches", 0)
        finish = Finish(several=alternatives > 0, rated=rated, matches=matches)
        found = await self._finished(text.sentences, finish, memory)
        learned = await self._call(partial(learned_for, sources=text.sentences), memory)
        translations, each = [one.best.text for one in found], zip(text.parts[::2], found, learned)
        sentences = [
            {
                "before": f"{before}{text.space_before(number, translations)}",
                "continues": number in text.continued,
                "source": best.source, "translation": best.text, "learned": known and of_pair(*known),
                "alternatives": [*dict.fromkeys(texts)][1 : 1 + alternatives], "matches": alike,
                "confidence": best.confidence, "words": best.word_confidences,
            }
            for number, (before, (best, texts, alike), known) in enumerate(each)
        ]  # fmt: skip
        return {"sentences": sentences, "after": text.parts[-1]}

    async def translate_file(self, asked: Parameters) -> dict[str, str]:
        """Translate the document `file`."""
        file, folder = asked.get("file"), Path(self.files.name)
        if not isinstance(file, UploadFile):
            raise bad("the form has no file: send one as the part file")
        self._check_languages(asked)
        name = _file_name(file.filename or "")
        if name.suffix.lower() not in FORMATS:
            raise bad(f"the file is {name}: expected a name that ends in one of {', '.join(FORMATS)}")
        if name.suffix.lower() not in usable():
            raise bad(f"this server translates no {name.suffix} files: {installing(EXTRA)}", 404)
        made = folder / f"{uuid4().hex}.{name.stem}_{language_code(self.target)}{name.suffix}"
        with TemporaryDirectory() as own:
            sent = Path(own, name)
            await asyncio.to_thread(sent.write_bytes, await file.read())
            with _naming(own):
                document = await asyncio.to_thread(open_document, sent)
            parts = await self._portions(document.segments, self._memory(asked))
            with atomic_file(made) as partial_file:
                await asyncio.to_thread(document.save, parts, partial_file)
        asyncio.get_running_loop().call_later(60 * MINUTES_KEPT, partial(made.unlink, missing_ok=True))
        for old in sorted(folder.iterdir(), key=lambda one: -one.stat().st_mtime)[MOST_FILES:]:
            old.unlink(missing_ok=True)
        return {"translatedFileUrl": f"{asked['site']}/download_file/{quote(made.name)}"}

    async def download_file(self, asked: Parameters) -> Response:
        """Return a translated document; whoever has its address may have it."""
        name = given.text(asked, "name", 1000)
        path = Path(self.files.name, Path(name).name)
        if not path.is_file():
            raise bad(f"there is no translated file {name}: each is kept for {MINUTES_KEPT} minutes", 404)
        return FileResponse(path, filename=name.partition(".")[2])

    async def languages(self, asked: Parameters) -> list[dict[str, Any]]:
        codes = language_code(self.source), language_code(self.target)
        both = zip(codes, ([codes[1]], []))
        return [{"code": code, "name": language_name(code), "targets": targets} for code, targets in both]

    async def detect(self, asked: Parameters) -> list[dict[str, Any]]:
        """Name the source language, the only one there is, with how much of the text its dictionary knows."""
        text = "\n".join(given.texts(asked, "q", self.limits.most_characters))
        return [self._detected(await self._call(partial(_known, text=text)))]

    async def health(self, asked: Parameters) -> dict[str, str]:
        if not self.work.alive:
            raise bad("the translator has stopped: start the server again", 503)
        return {"status": "ok"}

    async def settings(self, asked: Parameters) -> dict[str, Any]:
        pair = {"source": self.source, "target": self.target}
        return {
            "apiKeys": bool(self.limits.keys), "charLimit": self.limits.most_characters,
            "keyRequired": bool(self.limits.keys), "suggestions": self.learns,
            "supportedFilesFormat": usable(), "filesTranslation": True, "frontendTimeout": 500,
            "language": {side: {"code": language_code(one), "name": language_name(one)} for side, one in pair.items()},
        }  # fmt: skip

    # ---- what is learned

    async def learn(self, asked: Parameters) -> dict[str, Any]:
        most = self.limits.most_characters
        pair = given.text(asked, "q", most), given.text(asked, "s", most)
        self._check_languages(asked)
        memory = self._memory(asked, one=True)
        (learned,) = await self._learn([pair], memory, asked)
        if isinstance(learned, str):
            raise bad(f"the pair was not learned: {learned}")
        replaced = of_pair(learned.replaced, *memory) if learned.replaced is not None else None
        return {"success": True, "id": learned.id, "new": learned.new, "replaced": replaced} | whose(*memory)

    async def forget(self, asked: Parameters) -> dict[str, Any]:
        number, memory = given.number(asked, "id", 0), self._memory(asked, one=True)

        def forget(translator: Translator) -> list[LearnedPair]:
            if all(pair.id != number for pair in translator.memory()):
                raise bad(f"there is no pair {number} among what was learned", 404)
            return translator.forget(number)

        restored = await self._call(forget, memory)
        return {"success": True, "restored": [of_pair(pair, *memory) for pair in restored]}

    async def end(self, asked: Parameters) -> dict[str, Any]:
        """End a session; with `keep` 1 a memory first learns what counts in it."""
        own, counts, skipped = self._memory(asked, one=True), Counter[str](), Counter[str]()
        pairs = await self._call(lambda session: session.memory(counting=True)[::-1], own)
        if given.flag(asked, "keep"):
            memory = self._memory({**asked, "session": ""}, one=True)
            texts = [(one.source, one.target) for one in pairs]
            for at in range(0, len(texts), ROUND_SENTENCES):
                some = await self._learn(texts[at : at + ROUND_SENTENCES], memory, asked)
                count_learned(some, counts, skipped)

        def end(translator: Translator) -> None:
            if translator.over(own).memory(counting=True)[::-1] != pairs:
                raise bad("the session has changed since: end it again", 409)
            translator.end(*own)

        await self._call(end)
        kept = counts["learned"] + counts["again"]
        return {"success": True, "pairs": len(pairs), "kept": kept, "skipped": skipped}

    async def memory(self, asked: Parameters) -> dict[str, Any]:
        """Return the pairs that have all words of `q`, newest first."""
        query = given.text(asked, "q", self.limits.most_characters, "")
        most, memory = given.number(asked, "limit", MOST_PAIRS), self._memory(asked, one=True)
        found, terms = await self._call(lambda one: (one.memory(query), one.terms), memory)
        pairs = [of_pair(one, *memory) | ({"term": True} if one.id in terms else {}) for one in found[:most]]
        return {"pairs": pairs, "found": len(found)}

    async def export(self, asked: Parameters) -> Response:
        """Return the pairs that count, of those that have all words of `q`, as TMX."""
        query = given.text(asked, "q", self.limits.most_characters, "")
        memory = self._memory(asked, one=True)
        found = await self._call(lambda translator: translator.memory(query, counting=True), memory)
        text = await asyncio.to_thread(as_tmx, reversed(found), self.source, self.target)
        told = {"Content-Disposition": 'attachment; filename="memory.tmx"'}
        return Response(text, 200, told, "application/x-tmx+xml")

    async def add(self, asked: Parameters) -> Response:
        """Learn the pairs of the file `body`, whose `name` tells its kind; answers lines of JSON.

        `unconfirmed` 1 takes also what is not confirmed. Reading ends at once where the client leaves, or the
        server stops.
        """
        unconfirmed, left = given.flag(asked, "unconfirmed"), Event()
        name = _file_name(given.text(asked, "name", 1000))
        skipped, memory = Counter[str](), self._memory(asked, one=True)
        self._as_terms(asked, memory)  # which may be refused
        with ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory())
            await given.save(asked["body"], Path(folder, name))
            most = min(max(LEAST_UNPACKED, PACKING * Path(folder, name).stat().st_size), MOST_UNPACKED)
            stack.callback(left.set)

            def watch(count: int) -> None:
                if left.is_set() or self.stopping.is_set():
                    raise BusyError("the server is stopping")
                if count > most:
                    raise ConfigurationError(
                        f"the file is more than {most >> 10:,} KiB unpacked: use fairseq-ccpr learn"
                    )

            with _naming(folder):  # it may be no such file
                pairs = read_memory(Path(folder, name), self.source, self.target, skipped, unconfirmed, watch)
                batches = iter(lambda: list(islice(pairs, ROUND_SENTENCES)), [])
                first: list[Pair] = await asked["unless_gone"](asyncio.to_thread(next, batches, []))
            kept = stack.pop_all()

        async def lines() -> AsyncIterator[str]:
            some, counts = first, Counter(pairs=0, learned=0, again=0, replaced=0)
            end: dict[str, Any] = {"done": True}
            with kept:
                try:
                    while some:
                        count_learned(await self._learn(some, memory, asked), counts, skipped)
                        counts["pairs"] += len(some)
                        yield json.dumps(counts) + "\n"
                        some = await asyncio.to_thread(next, batches, [])
                except (CcprError, BusyError) as error:
                    end = {"error": str(error).replace(f"{folder}/", "")}
            yield json.dumps({**counts, "skipped": skipped, **end}) + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def explain(self, asked: Parameters) -> Explanation:
        """Translate the sentences of `q`, and say where each token came from."""
        text, memory = given.text(asked, "q", self.limits.most_characters), self._memory(asked, one=True)
        if "session" in asked:
            raise bad("a session is not explained: leave session out")
        self._check_languages(asked)
        sentences = (await self._divided([text], self._fitting))[0].sentences
        if not sentences:
            raise bad("the parameter q has no sentence: expected one or more")
        tokens = await self._call(partial(encode_sentences, sentences=sentences))
        explained: list[Explanation] = []
        while tokens:
            some = {number: tokens.pop(number) for number in [*tokens][:EXPLAINED]}
            explain = partial(explain_encoded, sentences=sentences, tokens=some, most_neighbours=NEIGHBOURS)
            async with self._explaining:  # one request before each round, the next one before the next
                explained.append(await self._call(explain, memory))
        return joined(explained)

    # ---- how

    def _memory(self, asked: Parameters, one: bool = False) -> tuple[str, ...]:
        """Return what a request is for: its session, and the datastores it names, or else the first it may use.

        Args:
            one: whether it is for one of them, which is the session if there is one.
        """
        opened, session = asked[OPENED] or self.names, given.text(asked, "session", 100, "")
        if session and not self.sessions:
            raise bad("a session is for one model, and --path names several: leave session out")
        begun = (Session.name_of(asked[OWNER], session),) if session else ()
        if one and begun:
            return begun
        names = given.names(asked, "memory") or tuple(opened[:1])
        if unknown := [name for name in names if name not in opened]:  # a closed one is answered alike
            known = " and ".join(opened) or "one, which has no name: leave memory out"
            raise bad(f"there is no memory {unknown[0]}: there is {known}", 404)
        if one and (several := len(names)) > 1:
            raise bad(f"the parameter memory has {several} names: expected one, several are for translation")
        return begun + names

    async def _learn(
        self, pairs: list[Pair], memory: tuple[str, ...], asked: Parameters
    ) -> list[Learned | str]:
        """Learn into one memory, as whoever asks; a session begins with what it learns, `term` 1 as terms too."""
        (name,), author = memory, self.limits.authors.get(asked[OWNER], "")
        term = self._as_terms(asked, memory)

        def learn(translator: Translator) -> list[Learned | str]:
            if not name.startswith(SESSION):
                return translator.over(memory).learn_all(pairs, author)
            session = translator.begin(name)
            try:
                if len(session.memory()) + len(pairs) > MOST_OF_SESSION:
                    raise ConfigurationError(f"a session has at most {MOST_OF_SESSION:,} pairs: end it")
                return session.learn_terms(pairs, author) if term else session.learn_all(pairs, author)
            finally:
                if not session.memory():
                    translator.end(name)

        return await self._call(learn)

    def _as_terms(self, asked: Parameters, memory: tuple[str, ...]) -> bool:
        if (term := given.flag(asked, "term")) and not memory[0].startswith(SESSION):
            raise bad("a term is learned in a session: name one, or give the server a --glossary")
        return term

    def _languages(self, asked: Parameters) -> tuple[str, str]:
        """Return the languages of a request as it names them, or as this server does."""
        source = given.text(asked, "source", 100, AUTO)
        return self.source if source == AUTO else source, given.text(asked, "target", 100, self.target)

    def _check_languages(self, asked: Parameters) -> None:
        own = self.source, self.target
        for side, code, known in zip(("source", "target"), self._languages(asked), own):
            if not same_language(code, known):
                pair = " to ".join(map(language_code, own))
                raise bad(f"the {side} language is {code}: this server translates from {pair}")

    def _detected(self, confidence: float) -> dict[str, Any]:
        return {"confidence": round(confidence, 1), "language": language_code(self.source)}

    def _copies(self, asked: Parameters) -> bool:
        """Tell whether a request is for a translation from one of the languages into the same."""
        codes = self._languages(asked)
        known = any(same_language(codes[0], own) for own in (self.source, self.target))
        return known and same_language(*codes) and not same_language(self.source, self.target)

    async def _divided(self, texts: list[str], divide: Divide) -> list[Segments]:
        segments = await asyncio.to_thread(lambda: [divide(text) for text in texts])
        count, most = sum(len(text.sentences) for text in segments), self.limits.most_sentences
        if count > most:
            raise bad(f"the text has {count:,} sentences, and this server takes {most:,}: divide it")
        return segments

    async def _translated(
        self, texts: list[str], divide: Divide, alternatives: int, memory: tuple[str, ...], rated: bool
    ) -> tuple[list[list[str]], list[float | None], list[int]]:
        """Return each text's best translation and others, a confidence, and how many sentences have parts.

        The confidence is the lowest in its sentences: None where one was not decoded, as unknown characters
        are copied, and 1 without any.
        """
        segments = await self._divided(texts, divide)
        sentences, marks = with_marks(segments)
        finish = Finish(marks, several=alternatives > 0, rated=rated)
        each = iter(await self._finished(sentences, finish, memory))
        found, confidences, divided = [], list[float | None](), list[int]()
        for text in segments:
            own = list(islice(each, len(text.sentences)))
            found.append(text.ranked([one.texts for one in own])[: 1 + alternatives])
            sure = (one.best.confidence for one in own)
            confidences.append(min(sure, key=lambda one: -1.0 if one is None else one, default=1.0))
            divided.append(sum(bool(one.best.parts) for one in own))
        return found, confidences, divided

    async def _portions(self, segments: list[Segments], memory: tuple[str, ...]) -> list[Any]:
        """Translate the sentences of a document, some at a time, so that it keeps nobody waiting.

        Once it has begun, it waits where others' sentences are too many.
        """
        sentences, marks = with_marks(segments)
        if len(sentences) > MOST_IN_FILE:
            count = f"the file has {len(sentences):,} sentences, and this server takes {MOST_IN_FILE:,}"
            raise bad(f"{count}: divide it, or use fairseq-ccpr translate", 413)
        most = self.limits.most_characters
        if long := next((one for one in sentences if len(one) > most), ""):
            told = f"a sentence of the file, {long[:40]!r} …, has {len(long):,} characters"
            raise bad(f"{told}, and this server takes {most:,}: end its sentences with a mark or a line", 413)
        found: list[Any] = []
        while some := sentences[len(found) : len(found) + PORTION]:
            finish = Finish(marks[len(found) : len(found) + PORTION], strict=False)
            try:
                more = await self._finished(some, finish, memory)
            except BusyError:
                if not found or self.stopping.is_set() or not self.work.alive:
                    raise
                await asyncio.sleep(1)
            else:
                found += [one.texts[0] for one in more]
        return found

    async def _finished(
        self, sentences: list[str], finish: Finish, memory: tuple[str, ...]
    ) -> list[Finished]:
        return await asyncio.wrap_future(self.work.translate(sentences, finish, memory))

    async def _call(self, function: Callable[[Translator], T], memory: tuple[str, ...] = ()) -> T:
        called = self.work.call(lambda translator: function(translator.over(memory)))
        return await asyncio.wrap_future(called)


def _file_name(given: str) -> Path:
    return Path(re.sub(r"[^\w. -]", "_", given).lstrip(".")[-60:] or "file")


@contextmanager
def _naming(folder: str) -> Iterator[None]:
    """Name a file that was sent as its sender does, where it is refused: without the server's folder."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace(f"{folder}/", "")) from None


def of_pair(pair: LearnedPair, memory: str) -> dict[str, Any]:
    """Return a learned pair of a memory or session as clients receive it; ids are of each its own."""
    fields = ("id", "source", "target", "count", "replaced_by", "time", "author")
    return {name: getattr(pair, name) for name in fields} | whose(memory)


def whose(name: str) -> dict[str, str]:
    """Return the parameter by which a request names a memory or session; nothing for one without a name."""
    if name.startswith(SESSION):
        return {"session": Session.called(name)}
    return {"memory": name} if name else {}


def _known(translator: Translator, text: str) -> float:
    ids = encode(text, translator.task)[:-1]
    return 100 * float((ids != translator.task.source_dictionary.unk()).float().mean()) if len(ids) else 0.0
