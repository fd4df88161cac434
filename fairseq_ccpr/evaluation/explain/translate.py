"""Translating sentences with retrieval and without, and breaking down where each token came from."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from fairseq import utils
from tqdm import tqdm

from fairseq_ccpr.decoding.breakdown import break_down
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.explain.corpus_text import CorpusText, why_not_the_corpus
from fairseq_ccpr.evaluation.explain.explanation import Explainer, Explanation, SentenceExplanation, Texts
from fairseq_ccpr.evaluation.translation.comparison import BASE, RETRIEVAL
from fairseq_ccpr.evaluation.translation.scores import score
from fairseq_ccpr.evaluation.translation.test_set import detokeniser, load

SCORE_NAMES = {"ip": "similarity", "l2": "squared distance"}


def explain(cfg: Any, count: int, numbers: list[int] | None, most_neighbours: int) -> Explanation:
    """Translate sentences of a subset with fairseq's plain generator and with the retrieving one, and say why.

    Args:
        cfg: the configuration of a `fairseq-generate --task translation_retrieval`.
        count: how many sentences, the first of the subset that the models can take.
        numbers: of the sentences in the subset, from 0, in place of the first.
        most_neighbours: that are kept of each token.

    Raises:
        ConfigurationError: the subset has no such sentence, or the models cannot take it; a reward, which no shares explain.
    """
    if cfg.task.phrase_reward:
        raise ConfigurationError("--phrase-reward gives phrases no share that could be explained: leave it out")
    task, models = load(cfg)
    numbers = _choose(cfg, task, models, count, numbers)
    plain = task.build_base_generator(models, cfg.generation)
    retrieving = task.build_generator(models, cfg.generation)
    ensemble = retrieving.model
    if ensemble.phrases is not None:  # breaking down does not retrieve for a batch again
        remembering = ensemble.phrases.remembering(ensemble.phrases.settings.k)
        ensemble = retrieving.model = ensemble.with_memories(ensemble.tokens, remembering)
    to_text = detokeniser(cfg, task)
    target_text = partial(to_text, task.target_dictionary)
    notes: list[str] = []
    corpus = _open_corpus(task, ensemble, target_text, notes)
    explainer = Explainer(task.target_dictionary, target_text, corpus, Texts(), most_neighbours)
    explained: dict[int, SentenceExplanation] = {}
    for sample in _batches(cfg, task, models, numbers):
        alone, written = (
            [hypotheses[0]["tokens"] for hypotheses in task.inference_step(generator, models, sample)]
            for generator in (plain, retrieving)
        )
        broken_down = break_down(ensemble, sample, written, task.target_dictionary)
        target = sample["target"]
        for row, number in enumerate(sample["id"].tolist()):
            source = to_text(task.source_dictionary, sample["net_input"]["src_tokens"][row])
            reference = to_text(task.target_dictionary, target[row], True) if target is not None else None
            explained[number] = explainer.sentence(
                broken_down, row, number, source, reference, target_text(alone[row]), target_text(written[row])
            )
    metric = ensemble.tokens.retriever.datastore.section.index.metric if ensemble.tokens is not None else "ip"
    explanation = Explanation(
        subset=cfg.dataset.gen_subset,
        source_language=task.cfg.source_lang,
        target_language=task.cfg.target_lang,
        sentences_in_subset=len(task.dataset(cfg.dataset.gen_subset)),
        signature=ensemble.signature(),
        token_memory=ensemble.tokens is not None,
        phrase_memory=ensemble.phrases is not None,
        score_name=SCORE_NAMES[metric],
        notes=notes,
        sentences=[explained[number] for number in numbers],
        texts=list(explainer.texts.numbers),
    )
    _score(explanation)
    return explanation


def _choose(cfg: Any, task: Any, models: list[Any], count: int, numbers: list[int] | None) -> list[int]:
    """Choose the sentences that are explained, each once."""
    subset = cfg.dataset.gen_subset
    dataset = task.dataset(subset)
    longest = utils.resolve_max_positions(task.max_positions(), *[model.max_positions() for model in models])
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


def _batches(cfg: Any, task: Any, models: list[Any], numbers: list[int]) -> Iterator[dict[str, Any]]:
    """These sentences in fairseq's batches, on the models' device."""
    dataset = task.dataset(cfg.dataset.gen_subset)
    order = dataset.ordered_indices()
    made = dataset.batch_by_size(order[np.isin(order, numbers)], cfg.dataset.max_tokens, cfg.dataset.batch_size)
    on_gpu = next(models[0].parameters()).is_cuda
    for batch in tqdm(made, desc=cfg.dataset.gen_subset, unit="batch", disable=cfg.common.no_progress_bar):
        sample = dataset.collater([dataset[number] for number in batch])
        yield utils.move_to_cuda(sample) if on_gpu else sample


def _open_corpus(task: Any, ensemble: RetrievalEnsemble, to_text: Any, notes: list[str]) -> CorpusText | None:
    """Return the text of the token datastore; where the data folder does not have it, a note."""
    if ensemble.tokens is None:
        return None
    datastore = ensemble.tokens.retriever.datastore
    reason = why_not_the_corpus(task, datastore)
    if reason is not None:
        notes.append(reason)
        return None
    return CorpusText(task, datastore, to_text)


def _score(explanation: Explanation) -> None:
    """BLEU of both systems over the sentences explained, where they have references."""
    references = [one.reference for one in explanation.sentences if one.reference is not None]
    if not references:
        return
    plain = score([one.plain for one in explanation.sentences], references)
    retrieval = score([one.translation for one in explanation.sentences], references)
    explanation.bleu = {BASE: plain.bleu, RETRIEVAL: retrieval.bleu}
    explanation.bleu_signature = plain.bleu_signature
