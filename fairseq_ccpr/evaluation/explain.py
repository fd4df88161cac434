"""Explaining translations of text and of binarised subsets: decode, force-decode with records, look up the evidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
from fairseq import utils
from torch import Tensor

from fairseq_ccpr.decoding.beam_search import OTHER_TEXT, translated_by
from fairseq_ccpr.decoding.breakdown import Breakdown, break_down
from fairseq_ccpr.decoding.ensemble import TEXTS, RetrievalEnsemble
from fairseq_ccpr.decoding.text_memory import TextMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.explanation import CorpusText, Explainer, Explanation, Match, SentenceExplanation
from fairseq_ccpr.evaluation.test_set import BASE, RETRIEVAL, score
from fairseq_ccpr.inference.system import System, batches_of, encode, length_limit
from fairseq_ccpr.inference.unknown import given_text
from fairseq_ccpr.text.decoder_subwords import UNKNOWN_SIGN
from fairseq_ccpr.text.languages import as_bcp47
from fairseq_ccpr.timing import progress_over

SCORE_NAMES = {"ip": "similarity", "l2": "squared distance"}


def explain_subset(
    system: System, count: int, numbers: list[int] | None, most_neighbours: int
) -> Explanation:
    """Translate sentences of `--gen-subset` with fairseq's plain generator and the retrieving one, and explain the result."""
    subset, task = system.cfg.dataset.gen_subset, system.task
    task.load_dataset(subset)
    numbers = _choose(system, count, numbers)
    explanation = _explain(system, _batches(system, numbers), most_neighbours)
    explanation.subset, explanation.sentences_in_subset = subset, len(task.dataset(subset))
    by_number = {one.number: one for one in explanation.sentences}
    explanation.sentences = [by_number[number] for number in numbers]
    if references := [one.reference for one in explanation.sentences if one.reference is not None]:
        texts = (
            [one.plain for one in explanation.sentences],
            [one.translation for one in explanation.sentences],
        )
        plain, retrieval = (score(text, references, task.cfg.target_lang) for text in texts)
        explanation.bleu = {BASE: plain.bleu, RETRIEVAL: retrieval.bleu}
        explanation.bleu_signature = plain.bleu_signature
    return explanation


def explain_sentences(system: System, sentences: list[str], most_neighbours: int) -> Explanation:
    """Translate raw sentences in both ways, and explain the result.

    Args:
        sentences: empty ones are left out.
    """
    return explain_encoded(system, sentences, encode_sentences(system, sentences), most_neighbours)


def encode_sentences(system: System, sentences: list[str]) -> dict[int, Tensor]:
    """Return the tokens of sentences by their numbers; empty ones are left out."""
    system.check_open()
    system.check_encoding()
    tokens = {number: ids for number, one in enumerate(sentences) if len(ids := encode(one, system.task)) > 1}
    if not tokens:
        raise ConfigurationError("there is no sentence to explain: all are empty")
    most = length_limit(system.task, system.models)
    for number, ids in tokens.items():
        if len(ids) > most:
            raise ConfigurationError(
                f"sentence {number + 1} has {len(ids):,} tokens, and the model takes {most:,}: divide it"
            )
    return tokens


def explain_encoded(
    system: System, sentences: list[str], tokens: dict[int, Tensor], most_neighbours: int
) -> Explanation:
    """Explain those of some sentences whose tokens are given, by their numbers; see `explain_sentences`."""
    numbers = list(tokens)

    def samples() -> Iterator[dict[str, Any]]:
        texts = [sentences[number] for number in numbers]
        for sample in batches_of(list(tokens.values()), system.cfg, system.task, sources=texts):
            sample["id"].apply_(lambda place: numbers[place])
            yield sample

    explanation = _explain(system, samples(), most_neighbours)
    explanation.sentences.sort(key=lambda one: one.number)
    return explanation


def matches_of(system: System, sentence: str) -> list[Match] | None:
    """Find the sentences of the datastore most like a sentence, as an explanation lists them.

    None: there is no datastore that has its source sentences.
    """
    if system.ensemble is None:
        return None
    corpus = _explainer(system, system.ensemble.now(), 0).corpus
    tokens = system.task.source_subwords(encode(sentence, system.task))
    likeness = corpus.likeness(tokens, given_text(sentence, system.task)) if corpus is not None else None
    return corpus.matches(likeness) if corpus is not None and likeness is not None else None


def _explain(system: System, samples: Iterable[dict[str, Any]], most_neighbours: int) -> Explanation:
    """Explain the sentences of fairseq's batches, in their order; those with a `target` have a reference."""
    if system.ensemble is None:
        raise ConfigurationError("there is nothing to explain without a datastore: give --datastore DIR")
    task, ensemble = system.task, system.ensemble.now()
    generators = system.generator(retrieve=False), system.generator()
    # Breaking down does not retrieve phrases for a batch again.
    remembering = [memory.remembering() for memory in ensemble.memories]
    ensemble = ensemble.replacing(*remembering, trust=ensemble.trust)
    task.equip(generators[1], ensemble)
    explainer = _explainer(system, ensemble, most_neighbours)
    explained: list[SentenceExplanation] = []
    for sample in samples:
        sample = utils.move_to_cuda(sample, system.device) if system.device.type == "cuda" else sample
        found = [task.inference_step(one, system.models, sample) for one in generators]
        alone, written = ([hypotheses[0] for hypotheses in each] for each in found)
        tokens = [one["tokens"] for one in written]
        breakdowns = {
            row: breakdown
            for used, rows in translated_by(generators[1], found[1])
            if rows
            for breakdown in [break_down(used, sample, tokens, task.target_dictionary)]
            for row in rows
        }
        for row, both in enumerate(zip(alone, written)):
            explained.append(_sentence(system, explainer, breakdowns[row], sample, row, *both))
    languages = as_bcp47(task.cfg.source_lang), as_bcp47(task.cfg.target_lang)
    names, corpus = [memory.name for memory in ensemble.voting], explainer.corpus
    score_name = SCORE_NAMES[corpus.datastore.section.index.metric if corpus is not None else "ip"]
    texts = list(explainer.texts)
    return Explanation(
        "", *languages, len(explained), ensemble.signature(), names, score_name, explained, texts
    )


def _explainer(system: System, ensemble: RetrievalEnsemble, most_neighbours: int) -> Explainer:
    source, target = (
        partial(system.to_text, dictionary, unknown=repeat(UNKNOWN_SIGN))
        for dictionary in (system.task.source_dictionary, system.task.target_dictionary)
    )
    corpus = None
    if (tokens := ensemble.find(TokenMemory)) is not None:
        learned = tokens.learned.entries if tokens.learned is not None else None
        corpus = CorpusText(tokens.retriever.datastore, target, learned, source)
    text = ensemble.find(TextMemory)
    return Explainer(system.task.target_dictionary, target, source, corpus, {}, most_neighbours, text)


def _sentence(
    system: System,
    explainer: Explainer,
    breakdown: Breakdown,
    sample: dict[str, Any],
    row: int,
    alone: dict[str, Any],
    written: dict[str, Any],
) -> SentenceExplanation:
    """Explain the sentence at a place in a batch, of which both hypotheses are given."""
    task, dictionary = system.task, system.task.target_dictionary
    number, tokens = int(sample["id"][row]), sample["net_input"]["src_tokens"][row]
    reference = None
    if sample["target"] is not None:  # an unknown token is written as no translation has it
        reference = system.to_text(dictionary, sample["target"][row], unknown=repeat(2 * UNKNOWN_SIGN))
    text = sample[TEXTS][row] if sample.get(TEXTS) else None
    if text is not None and system.knows_nothing(text, tokens):
        return SentenceExplanation(number, text, None, text, [], text, [], [], 0.0, None, [])
    source, corpus = text or explainer.source_text(tokens), explainer.corpus
    likeness = corpus.likeness(task.source_subwords(tokens), source) if corpus is not None else None
    plain, translation = (
        partial(system.to_text, dictionary, unknown=system.copied(text, tokens, one))
        for one in (alone, written)
    )
    explained = explainer.sentence(
        breakdown, row, number, source, reference, plain(alone["tokens"]), translation, likeness
    )
    explained.other_text = OTHER_TEXT in written
    return explained


def _choose(system: System, count: int, numbers: list[int] | None) -> list[int]:
    task, subset = system.task, system.cfg.dataset.gen_subset
    dataset = task.dataset(subset)
    longest = utils.resolve_max_positions(
        task.max_positions(), *[model.max_positions() for model in system.models]
    )
    fit, _ = dataset.filter_indices_by_size(np.arange(len(dataset)), longest)
    if not len(fit):
        raise ConfigurationError(f"the subset '{subset}' has no sentence that the model can take")
    if numbers is None:
        return fit[:count].tolist()
    for number in numbers:
        if not 0 <= number < len(dataset):
            raise ConfigurationError(
                f"--ids: the subset '{subset}' has no sentence {number}, only 0 to {len(dataset) - 1}"
            )
        if number not in fit:
            raise ConfigurationError(f"--ids: sentence {number} of '{subset}' is longer than the model takes")
    return list(dict.fromkeys(numbers))


def _batches(system: System, numbers: list[int]) -> Iterator[dict[str, Any]]:
    cfg = system.cfg
    dataset = system.task.dataset(cfg.dataset.gen_subset)
    order = dataset.ordered_indices()
    made = dataset.batch_by_size(
        order[np.isin(order, numbers)], cfg.dataset.max_tokens, cfg.dataset.batch_size
    )
    for batch in progress_over(made, cfg.dataset.gen_subset, "sentence", len, cfg.common.no_progress_bar):
        yield dataset.collater([dataset[number] for number in batch])
