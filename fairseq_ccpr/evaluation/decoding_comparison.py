"""Decoding a test set with the base model and with retrieval in one run: quality, and speed as a ratio."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from fairseq import checkpoint_utils, tasks, utils
from tqdm import tqdm

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.scores import score, sentence_chrf
from fairseq_ccpr.tasks.translation_retrieval import TranslationRetrievalTask

BASE, RETRIEVAL = "base", "retrieval"


@dataclass
class System:
    """What one system wrote, by sentence id, and how long it took."""

    hypotheses: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    tokens: int = 0


@dataclass
class Comparison:
    """Both systems on one test set."""

    retrieval_signature: str
    sources: dict[int, str] = field(default_factory=dict)
    references: dict[int, str] = field(default_factory=dict)
    systems: dict[str, System] = field(default_factory=lambda: {BASE: System(), RETRIEVAL: System()})

    def rows(self) -> list[dict[str, Any]]:
        """A row a system: scores, seconds, tokens a second, and those as a ratio to the base model's."""
        rows = []
        base = self.systems[BASE]
        for name, system in self.systems.items():
            ids = sorted(self.references)
            scores = score([system.hypotheses[i] for i in ids], [self.references[i] for i in ids])
            speed = system.tokens / system.seconds
            ratio = speed * base.seconds / base.tokens
            timing = {"seconds": round(system.seconds, 1), "tokens_per_second": round(speed), "speed": round(ratio, 3)}
            rows.append({"system": name, **asdict(scores), **timing})
        return rows

    def examples(self, count: int) -> list[int]:
        """The sentences whose translation retrieval brought nearest to the reference, by chrF gained."""
        base, retrieval = (self.systems[name].hypotheses for name in (BASE, RETRIEVAL))
        gains = {
            i: sentence_chrf(retrieval[i], reference) - sentence_chrf(base[i], reference)
            for i, reference in self.references.items()
            if base[i] != retrieval[i]
        }
        return sorted(gains, key=lambda i: (-gains[i], i))[:count]


def compare_decoding(cfg: Any) -> Comparison:
    """Decode a subset with fairseq's plain generator and with the retrieving one.

    The two take turns batch by batch, so that whatever else the machine is doing falls on both alike. Sentences longer
    than the model takes are left out for both.

    Args:
        cfg: the configuration of a `fairseq-generate --task translation_retrieval`.
    """
    task = tasks.setup_task(cfg.task)
    if not isinstance(task, TranslationRetrievalTask):
        raise ConfigurationError(f"--task {cfg.task._name} does not retrieve: use translation_retrieval")
    models = _load_models(cfg, task)
    generators = {
        BASE: task.build_base_generator(models, cfg.generation),
        RETRIEVAL: task.build_generator(models, cfg.generation),
    }
    comparison = Comparison(generators[RETRIEVAL].model.signature())
    batches = task.get_batch_iterator(
        dataset=task.dataset(cfg.dataset.gen_subset),
        max_tokens=cfg.dataset.max_tokens,
        max_sentences=cfg.dataset.batch_size,
        max_positions=utils.resolve_max_positions(task.max_positions(), *[m.max_positions() for m in models]),
        ignore_invalid_inputs=True,
    ).next_epoch_itr(shuffle=False)
    to_text = _detokeniser(cfg, task)
    for number, sample in enumerate(tqdm(batches, desc="decoding", unit="batch", disable=cfg.common.no_progress_bar)):
        if next(models[0].parameters()).is_cuda:
            sample = utils.move_to_cuda(sample)
        ids = sample["id"].tolist()
        for row, i in enumerate(ids):
            comparison.sources[i] = to_text(task.source_dictionary, sample["net_input"]["src_tokens"][row])
            comparison.references[i] = to_text(task.target_dictionary, sample["target"][row], True)
        if number == 0:  # warm up
            for generator in generators.values():
                task.inference_step(generator, models, sample)
        for name, generator in generators.items():
            start = time.perf_counter()
            best = [hypotheses[0]["tokens"] for hypotheses in task.inference_step(generator, models, sample)]
            system = comparison.systems[name]
            system.tokens += sum(len(tokens) for tokens in best)
            system.hypotheses |= {i: to_text(task.target_dictionary, tokens) for i, tokens in zip(ids, best)}
            system.seconds += time.perf_counter() - start
    return comparison


def _load_models(cfg: Any, task: Any) -> list[Any]:
    """The models of `--path`, and the dataset, as fairseq-generate loads them."""
    overrides = ast.literal_eval(cfg.common_eval.model_overrides)
    models, saved = checkpoint_utils.load_model_ensemble(
        utils.split_paths(cfg.common_eval.path), arg_overrides=overrides, task=task
    )
    for model in models:
        if cfg.common.fp16:
            model.half()
        if torch.cuda.is_available() and not cfg.common.cpu:
            model.cuda()
        model.prepare_for_inference_(cfg)
    task.load_dataset(cfg.dataset.gen_subset, task_cfg=saved.task)
    return models


def _detokeniser(cfg: Any, task: Any) -> Callable[..., str]:
    """From a dictionary and token ids to text, as fairseq-generate prints it.

    A reference's unknown tokens are written in a way that no hypothesis matches.
    """
    tokenizer, bpe = task.build_tokenizer(cfg.tokenizer), task.build_bpe(cfg.bpe)

    def to_text(dictionary: Any, tokens: torch.Tensor, reference: bool = False) -> str:
        tokens = utils.strip_pad(tokens, dictionary.pad()).int().cpu()
        text = dictionary.string(tokens, cfg.common_eval.post_process, escape_unk=reference)
        text = bpe.decode(text) if bpe is not None else text
        return tokenizer.decode(text) if tokenizer is not None else text

    return to_text
