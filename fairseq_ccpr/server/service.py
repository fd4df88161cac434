"""The server's functions: LibreTranslate's API, and those that it lacks: learning, forgetting, explaining."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

from starlette.datastructures import UploadFile
from starlette.responses import FileResponse, Response, StreamingResponse

from fairseq_ccpr.datastore.learned import LearnedPair
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.errors import CcprError, ConfigurationError, installing
from fairseq_ccpr.evaluation.explain import encode_sentences
from fairseq_ccpr.evaluation.explanation import Explanation, unexplained
from fairseq_ccpr.inference.alignment import with_markup
from fairseq_ccpr.inference.learning import count_learned, learned_memory
from fairseq_ccpr.inference.system import SESSION, Translation, encode
from fairseq_ccpr.server import parameters as given
from fairseq_ccpr.server.access import Limits, split_names
from fairseq_ccpr.server.parameters import OPENED, OWNER, Parameters, bad
from fairseq_ccpr.server.work import ROUND_SENTENCES, BusyError, Work
from fairseq_ccpr.storage.files import atomic_file
from fairseq_ccpr.text.documents import EXTRA, FORMATS, open_document, usable
from fairseq_ccpr.text.html import Page
from fairseq_ccpr.text.languages import as_bcp47, language_code, language_name, same_language
from fairseq_ccpr.text.sentences import Mark, Parts, Segments, with_marks
from fairseq_ccpr.text.translation_memory import Pair, read_memory, tmx_lines
from fairseq_ccpr.translator import Translator

AUTO = "auto"
TEXT, HTML = "text", "html"
# bytes of a file: at least, as a multiple, at most
LEAST_UNPACKED, PACKING, MOST_UNPACKED = 1 << 22, 100, 1 << 30
PORTION, MOST_IN_FILE = 256, 50_000  # sentences of a document that wait at once, and that it may have
MINUTES_KEPT, MOST_FILES = 30, 256  # of translated files
MOST_PAIRS = 100  # of the memory that one answer has unless asked for more

T = TypeVar("T")


class Service:
    """Answers the requests; only this may use the translator from now on."""

    def __init__(self, translator: Translator, limits: Limits) -> None:
        self.work, self.limits, self.stopping = Work(translator), limits, Event()
        task = translator.cfg.task
        self.source, self.target = task.source_lang, task.target_lang
        memories = {
            name: one.ensemble.memories if one.ensemble is not None else ()
            for name, one in translator.named.items()
        }
        self.names = [*memories]
        self.memories = [one.name for one in next(iter(memories.values())) if one.acts_on == "vote"]
        self.learns = any(one.name == TokenMemory.name for own in memories.values() for one in own)
        self.explained = {  # datastores that can be explained
            name for name, own in memories.items() if own and not any(memory.unscored for memory in own)
        }
        self.files, self.made = TemporaryDirectory(), list[Path]()

    def of_page(self) -> dict[str, Any]:
        return {
            "source_language": language_code(self.source), "target_language": language_code(self.target),
            "names": {"source": language_name(self.source), "target": language_name(self.target)},
            "memories": self.memories, "explains": bool(self.explained), "learns": self.learns,
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
            found, confidences = [[text] for text in texts], [1.0] * len(texts)
        else:
            self._check_languages(asked)
            divide, memory = Page if kind == HTML else Segments, self._memory(asked)
            if rated:
                await self._call(Translator.check_confidence, memory)
            found, confidences = await self._translated(texts, divide, alternatives, memory, rated)
        found = [one if sure >= least else [""] for one, sure in zip(found, confidences)]
        answer: dict[str, Any] = {"translatedText": [texts[0] for texts in found] if several else found[0][0]}
        if alternatives:
            others = [texts[1:] for texts in found]
            answer["alternatives"] = others if several else others[0]
        if rated:
            answer["confidence"] = confidences if several else confidences[0]
        if asked.get("source") == AUTO:
            detected = [self._detected(100.0) for _ in found]
            answer["detectedLanguage"] = detected if several else detected[0]
        return answer

    async def sentences(self, asked: Parameters) -> dict[str, Any]:
        """Translate `q`, and tell its sentences apart: what is before each, and the pair learned for it."""
        memory = self._memory(asked)
        (text,) = await self._divided([given.text(asked, "q", self.limits.most_characters)], Segments)
        found = await asyncio.wrap_future(self.work.translate(text.sentences, _rated, memory))
        learned = await self._call(partial(_learned, sources=text.sentences), memory) if self.learns else {}
        translations = [one.text for one in found]
        sentences = [
            {
                "before": f"{before}{text.space_before(number, translations)}",
                "source": one.source, "translation": one.text, "learned": learned.get(one.source),
                "confidence": one.confidence, "words": one.word_confidences,
            }
            for number, (before, one) in enumerate(zip(text.parts[::2], found))
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
            try:
                document = await asyncio.to_thread(open_document, sent)
            except ConfigurationError as error:
                raise ConfigurationError(str(error).replace(f"{own}/", "")) from None
            parts = await self._portions(document.segments, self._memory(asked))
            with atomic_file(made) as partial_file:
                await asyncio.to_thread(document.save, parts, partial_file)
        asyncio.get_running_loop().call_later(60 * MINUTES_KEPT, partial(made.unlink, missing_ok=True))
        self.made = [*self.made, made]
        for old in self.made[:-MOST_FILES]:
            old.unlink(missing_ok=True)
        self.made = self.made[-MOST_FILES:]
        return {"translatedFileUrl": f"{asked['site']}/download_file/{quote(made.name)}"}

    async def download_file(self, asked: Parameters) -> Response:
        """Return a translated document; whoever has its address may have it."""
        name = given.text(asked, "name", 1000)
        path = Path(self.files.name, Path(name).name)
        if not path.is_file():
            raise bad(f"there is no translated file {name}: each is kept for {MINUTES_KEPT} minutes", 404)
        return FileResponse(path, filename=name.partition(".")[2])

    async def languages(self, asked: Parameters) -> list[dict[str, Any]]:
        both: tuple[tuple[str, list[str]], ...] = (
            (self.source, [language_code(self.target)]),
            (self.target, []),
        )
        return [
            {"code": language_code(code), "name": language_name(code), "targets": targets}
            for code, targets in both
        ]

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
            "supportedFilesFormat": usable(), "filesTranslation": True,
            "frontendTimeout": 500,
            "language": {side: {"code": language_code(one), "name": language_name(one)} for side, one in pair.items()},
        }  # fmt: skip

    # ---- what is learned

    async def learn(self, asked: Parameters) -> dict[str, Any]:
        most = self.limits.most_characters
        source, target = given.text(asked, "q", most), given.text(asked, "s", most)
        self._check_languages(asked)
        memory = self._memory(asked, one=True)
        learned = await self._call(lambda translator: translator.learn(source, target), memory)
        replaced = of_pair(learned.replaced) if learned.replaced is not None else None
        return {"success": True, "id": learned.id, "new": learned.new, "replaced": replaced}

    async def forget(self, asked: Parameters) -> dict[str, Any]:
        number = given.number(asked, "id", 0)

        def forget(translator: Translator) -> list[LearnedPair]:
            if all(pair.id != number for pair in translator.memory()):
                raise bad(f"there is no pair {number} among what was learned", 404)
            return translator.forget(number)

        restored = await self._call(forget, self._memory(asked, one=True))
        return {"success": True, "restored": [of_pair(pair) for pair in restored]}

    async def end(self, asked: Parameters) -> dict[str, Any]:
        """End a session; with `keep` 1 the memory learns what counts in it."""
        (session,), keep = self._memory(asked, one=True), given.number(asked, "keep", 0)
        memory = self._memory({**asked, "session": ""}, one=True)

        def end(translator: Translator) -> dict[str, Any]:
            own = reversed(translator.over([session]).memory())
            pairs = [(one.source, one.target) for one in own if one.replaced_by is None]
            kept = translator.over(memory).learn_all(pairs) if keep and pairs else []
            translator.end(session)
            learned = sum(not isinstance(one, str) for one in kept)
            return {"success": True, "pairs": len(pairs), "kept": learned}

        return await self._call(end)

    async def memory(self, asked: Parameters) -> dict[str, Any]:
        """Return the pairs that have all words of `q`, newest first."""
        query = given.text(asked, "q", self.limits.most_characters, "")
        most = given.number(asked, "limit", MOST_PAIRS)
        found = await self._call(lambda translator: translator.memory(query), self._memory(asked, one=True))
        return {"pairs": [of_pair(one) for one in found[:most]], "found": len(found)}

    async def export(self, asked: Parameters) -> Response:
        """Return the pairs that count, of those that have all words of `q`, as TMX."""
        query = given.text(asked, "q", self.limits.most_characters, "")
        found = await self._call(lambda translator: translator.memory(query), self._memory(asked, one=True))
        texts = ((str(one.id), one.source, one.target) for one in reversed(found) if one.replaced_by is None)
        lines = tmx_lines(as_bcp47(self.source), as_bcp47(self.target), texts)
        told = {"Content-Disposition": 'attachment; filename="memory.tmx"'}
        return Response(await asyncio.to_thread("\n".join, lines), 200, told, "application/x-tmx+xml")

    async def add(self, asked: Parameters) -> Response:
        """Learn the pairs of the file `body`, whose `name` tells its kind; answers lines of JSON.

        `unconfirmed` 1 takes also what is not confirmed. Reading ends at once where the client leaves, or the
        server stops.
        """
        unconfirmed, left = bool(given.number(asked, "unconfirmed", 0)), Event()
        name = _file_name(given.text(asked, "name", 1000))
        skipped, memory = Counter[str](), self._memory(asked, one=True)
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

            def told_here(error: Exception) -> str:
                return str(error).replace(f"{folder}/", "")

            try:
                pairs = read_memory(Path(folder, name), self.source, self.target, skipped, unconfirmed, watch)
                batches = iter(lambda: list(islice(pairs, ROUND_SENTENCES)), [])
                first: list[Pair] = await asked["unless_gone"](asyncio.to_thread(next, batches, []))
            except ConfigurationError as error:  # this is no such file
                raise ConfigurationError(told_here(error)) from None
            kept = stack.pop_all()

        async def lines() -> AsyncIterator[str]:
            some, counts = first, Counter(pairs=0, learned=0, again=0, replaced=0)
            end: dict[str, Any] = {"done": True}
            with kept:
                try:
                    while some:
                        learned = await self._call(partial(Translator.learn_all, pairs=some), memory)
                        count_learned(learned, counts, skipped)
                        counts["pairs"] += len(some)
                        yield json.dumps(counts) + "\n"
                        some = await asyncio.to_thread(next, batches, [])
                except (CcprError, BusyError) as error:
                    end = {"error": told_here(error)}
            yield json.dumps({**counts, "skipped": skipped, **end}) + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def explain(self, asked: Parameters) -> Explanation:
        """Translate the sentences of `q`, and say where each token came from, where this server can."""
        text, memory = given.text(asked, "q", self.limits.most_characters), self._memory(asked, one=True)
        if "session" in asked:
            raise bad("a session is not explained: leave session out")
        self._check_languages(asked)
        sentences = (await self._divided([text], Segments))[0].sentences
        if not sentences:
            raise bad("the parameter q has no sentence: expected one or more")
        if memory[0] not in self.explained:
            translations = await asyncio.wrap_future(self.work.translate(sentences, _checked, memory))
            found = [(one.source, one.text) for one in translations]
            signature = await self._call(lambda translator: translator.signature, memory)
            return unexplained(
                found, (language_code(self.source), language_code(self.target)), signature or ""
            )
        tokens = await self._call(lambda translator: encode_sentences(translator, sentences))
        return await asyncio.wrap_future(self.work.explain(sentences, tokens, memory))

    # ---- how

    def _memory(self, asked: Parameters, one: bool = False) -> tuple[str, ...]:
        """Return what a request is for: its session, and the datastores it names, or else the first it may use.

        Args:
            one: whether it is for one of them, which is the session if there is one.
        """
        opened, session = asked[OPENED] or self.names, given.text(asked, "session", 100, "")
        names = split_names(given.text(asked, "memory", 1000, "")) or tuple(opened[:1])
        if unknown := [name for name in names if name and name not in self.names]:
            known = " and ".join(opened) or "one, which has no name: leave memory out"
            raise bad(f"there is no memory {unknown[0]}: there is {known}", 404)
        if closed := [name for name in names if name not in opened]:
            known = " and ".join(opened)
            raise bad(f"the API key does not open the memory {closed[0]}: it opens {known}", 403)
        if one and (several := len(names)) > 1:
            raise bad(f"the parameter memory has {several} names: expected one, several are for translation")
        begun = (f"{SESSION}{asked[OWNER]} {session}",) if session else ()  # which is of its key alone
        return begun if one and begun else begun + names

    def _check_languages(self, asked: Parameters) -> None:
        for name, own in (("source", self.source), ("target", self.target)):
            code = given.text(asked, name, 100, own)
            if not same_language(code, own) and (name, code) != ("source", AUTO):
                source, target = map(language_code, (self.source, self.target))
                raise bad(f"{name} is {code}: this server translates from {source} to {target}")

    def _detected(self, confidence: float) -> dict[str, Any]:
        return {"confidence": round(confidence, 1), "language": language_code(self.source)}

    def _copies(self, asked: Parameters) -> bool:
        """Tell whether a request is for a translation from one of the languages into the same."""
        codes = [
            given.text(asked, name, 100, own)
            for name, own in (("source", self.source), ("target", self.target))
        ]
        codes[0] = self.source if codes[0] == AUTO else codes[0]
        known = any(same_language(codes[0], own) for own in (self.source, self.target))
        return known and same_language(*codes) and not same_language(self.source, self.target)

    async def _divided(self, texts: list[str], kind: type[Segments]) -> list[Segments]:
        segments = await asyncio.to_thread(lambda: [kind.of(text) for text in texts])
        count, most = sum(len(text.sentences) for text in segments), self.limits.most_sentences
        if count > most:
            raise bad(f"the parameter q has {count:,} sentences, and this server takes {most:,}: divide it")
        return segments

    async def _translated(
        self, texts: list[str], kind: type[Segments], alternatives: int, memory: tuple[str, ...], rated: bool
    ) -> tuple[list[list[str]], list[float]]:
        """Return each text's best translation and others, and the lowest confidence in its sentences."""
        segments = await self._divided(texts, kind)
        sentences, marks = with_marks(segments)
        finish = partial(_with_markup, marks, alternatives, rated)
        translations: list[Any] = await asyncio.wrap_future(self.work.translate(sentences, finish, memory))
        each = iter(translations)
        found, confidences = [], []
        for text in segments:
            own, sure = zip(*[next(each) for _ in text.sentences]) if text.sentences else ((), ())
            found.append(_joined(text, [*own], alternatives))
            confidences.append(min((one for one in sure if one is not None), default=1.0))
        return found, confidences

    async def _portions(self, segments: list[Segments], memory: tuple[str, ...]) -> list[Any]:
        """Translate the sentences of a document, some at a time, so that it keeps nobody waiting.

        Once it has begun, it waits where others' sentences are too many.
        """
        sentences, marks = with_marks(segments)
        if len(sentences) > MOST_IN_FILE:
            count = f"the file has {len(sentences):,} sentences, and this server takes {MOST_IN_FILE:,}"
            raise bad(f"{count}: divide it, or use fairseq-ccpr translate", 413)
        found: list[Any] = []
        while some := sentences[len(found) : len(found) + PORTION]:
            finish = partial(_as_far_as_translated, marks[len(found) : len(found) + PORTION])
            try:
                more: list[Any] = await asyncio.wrap_future(self.work.translate(some, finish, memory))
            except BusyError:
                if not found or self.stopping.is_set() or not self.work.alive:
                    raise
                await asyncio.sleep(1)
            else:
                found += more
        return found

    async def _call(self, function: Callable[[Translator], T], memory: tuple[str, ...] = ()) -> T:
        called = self.work.call(lambda translator: function(translator.over(memory)))
        return await asyncio.wrap_future(called)


def _file_name(given: str) -> Path:
    return Path(re.sub(r"[^\w. -]", "_", given).lstrip(".")[-60:] or "file")


def _as_far_as_translated(
    marks: Sequence[list[Mark]], translator: Translator, first: int, translations: list[Translation]
) -> list[str | Parts]:
    """Return translations with the markup of their sources; a sentence without one stays as it is."""
    return [one for (one,) in with_markup(translator, [[one] for one in translations], marks[first:])]


def _checked(translator: Translator, first: int, translations: list[Translation]) -> list[Translation]:
    for number, one in enumerate(translations, first + 1):
        if one.fault:
            raise bad(f"sentence {number} has no translation: {one.fault}")
    return translations


def _rated(translator: Translator, first: int, translations: list[Translation]) -> list[Translation]:
    return list(map(translator.rated, _checked(translator, first, translations)))


def _with_markup(
    marks: list[list[Mark]],
    alternatives: int,
    rated: bool,
    translator: Translator,
    first: int,
    translations: list[Translation],
) -> list[tuple[list[str | Parts], float | None]]:
    """Return the best translations of each sentence, with the markup of its source, and the confidence."""
    translations = (_rated if rated else _checked)(translator, first, translations)
    ranked = [[one, *one.alternatives] if alternatives else [one] for one in translations]
    marked = with_markup(translator, ranked, marks[first:])
    return [(texts, best[0].confidence) for texts, best in zip(marked, ranked)]


def _joined(text: Segments, translations: list[list[str | Parts]], alternatives: int) -> list[str]:
    """Return the best translation of a text, then others: the n-th has of each sentence the n-th best."""
    ranks = range(max(map(len, translations), default=1))
    found = [text.join([each[min(rank, len(each) - 1)] for each in translations]) for rank in ranks]
    return list(dict.fromkeys(found))[: 1 + alternatives]


def of_pair(pair: LearnedPair) -> dict[str, Any]:
    """Return a learned pair as clients receive it."""
    return {name: getattr(pair, name) for name in ("id", "source", "target", "count", "replaced_by")}


def _known(translator: Translator, text: str) -> float:
    ids = encode(text, translator.task)[:-1]
    return 100 * float((ids != translator.task.source_dictionary.unk()).float().mean()) if len(ids) else 0.0


def _learned(translator: Translator, sources: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for one in reversed([one for one in translator.members if one.find_memory(TokenMemory) is not None]):
        store = learned_memory(one).store
        pairs = {source: store.counting(one.task.read_as(source)) for source in sources}
        found |= {source: of_pair(pair) for source, pair in pairs.items() if pair is not None}
    return found
