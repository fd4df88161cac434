"""The part of DeepL's API that its clients translate by, over the functions of the service."""

from __future__ import annotations

from typing import Any

from fairseq_ccpr.server import parameters as given
from fairseq_ccpr.server.parameters import Parameters, bad
from fairseq_ccpr.server.service import AUTO, HTML, KEPT, TEXT, Service
from fairseq_ccpr.text.languages import language_code, language_name

VERSIONS = "/v2/", "/v3/"  # of its paths; of the second there is nothing here
VARIANTS = {  # its clients ask for these as targets
    "en": {"EN-GB": "English (British)", "EN-US": "English (American)"},
    "pt": {"PT-BR": "Portuguese (Brazilian)", "PT-PT": "Portuguese (European)"},
}
_WITHOUT_EFFECT = """
glossary_id glossary_ids style_id translation_memory_id custom_instructions formality context model_type
split_sentences preserve_formatting splitting_tags non_splitting_tags outline_detection tag_handling_version
"""
WITHOUT_EFFECT = _WITHOUT_EFFECT.split()
UNLIMITED = 10**12  # characters, as DeepL says it


class DeepL:
    """Answers as DeepL does: the same translations, glossary and memories as by the service's other paths."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def translate(self, asked: Parameters) -> dict[str, Any]:
        """Translate `text`, one or several; a `warning` tells what would count there and does not here."""
        texts = given.texts(asked, "text", self.service.limits.most_characters)
        tags = given.text(asked, "tag_handling", 20, "")
        if tags not in ("", "html", "xml"):
            raise bad(f"tag_handling is {tags}: html or xml")
        source = given.text(asked, "source_lang", 100, AUTO)
        asked |= {"q": texts, "source": source, "target": given.text(asked, "target_lang", 100)}
        asked |= {"format": HTML if tags else TEXT, "alternatives": 0}
        answer = await self.service.translate(asked)
        found = language_code(self.service.source if source == AUTO else source).upper()
        translations = [
            {"detected_source_language": found, "text": translation, "billed_characters": len(text)}
            for text, translation in zip(texts, answer["translatedText"])
        ]
        useless = WITHOUT_EFFECT if tags else [*WITHOUT_EFFECT, KEPT]
        told = [name for name in useless if name in asked]
        warning = f"without effect here: {', '.join(told)}"
        return {"translations": translations} | ({"warning": warning} if told else {})

    async def languages(self, asked: Parameters) -> list[dict[str, Any]]:
        target = asked.get("type") == "target"
        code = language_code(self.service.target if target else self.service.source)
        own = {code.upper(): language_name(code)}
        codes = VARIANTS.get(code, own) if target else own
        return [{"language": one, "name": name, "supports_formality": False} for one, name in codes.items()]

    async def usage(self, asked: Parameters) -> dict[str, int]:
        return {"character_count": 0, "character_limit": UNLIMITED}

    async def glossary_pairs(self, asked: Parameters) -> dict[str, list[Any]]:
        return {"supported_languages": []}
