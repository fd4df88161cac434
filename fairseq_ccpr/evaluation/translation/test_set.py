"""Decoding a test set with several systems in one run: what each writes, and how fast."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from tqdm import tqdm

from fairseq_ccpr.decoding.task import TranslationRetrievalTask
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.translation.scores import TranslationScores, score


@dataclass
class System:
    """What one system wrote, by sentence id, and how long it took."""

    hypotheses: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Target tokens of the best hypotheses a second."""
        return self.tokens / self.seconds


@dataclass
class Decodings:
    """The outputs of several systems for one test set."""

    systems: dict[str, System]
    sources: dict[int, str] = field(default_factory=dict)
    references: dict[int, str] = field(default_factory=dict)

    def scores(self, name: str) -> TranslationScores:
        """Score one system by BLEU and chrF."""
        ids = sorted(self.references)
        return score([self.systems[name].hypotheses[i] for i in ids], [self.references[i] for i in ids])


def parse_generation(arguments: list[str]) -> Any:
    """Parse options of fairseq-generate, with retrieval as the default task.

    Raises:
        ConfigurationError: there is no --path, or there are options that would have no effect here.
    """
    parser = options.get_generation_parser(default_task="translation_retrieval")
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=arguments))
    if cfg.common_eval.path is None:
        raise ConfigurationError("give the model's checkpoint with --path")
    unused = {
        "--lm-path": cfg.generation.lm_path,
        "--replace-unk": cfg.generation.replace_unk,
        "--prefix-size": cfg.generation.prefix_size,
        "--knn-log": cfg.task.get("knn_log"),
    }
    for name, value in unused.items():
        if value:
            raise ConfigurationError(f"{name} is for fairseq-generate alone: leave it out here")
    if cfg.dataset.max_tokens is None and cfg.dataset.batch_size is None:
        cfg.dataset.max_tokens = 12000  # as fairseq-generate does
    return cfg


def load(cfg: Any) -> tuple[TranslationRetrievalTask, list[Any]]:
    """Load the task, its dataset, and the models of `--path`, as fairseq-generate does."""
    task = tasks.setup_task(cfg.task)
    if not isinstance(task, TranslationRetrievalTask):
        raise ConfigurationError(f"--task {cfg.task._name} does not retrieve: use translation_retrieval")
    models, saved = checkpoint_utils.load_model_ensemble(
        utils.split_paths(cfg.common_eval.path),
        arg_overrides=ast.literal_eval(cfg.common_eval.model_overrides),
        task=task,
    )
    utils.set_torch_seed(cfg.common.seed)
    for model in models:
        if cfg.common.fp16:
            model.half()
        model.to(choose_device(cfg.common.cpu))
        model.prepare_for_inference_(cfg)
    task.load_dataset(cfg.dataset.gen_subset, task_cfg=saved.task)
    task.build_tokenizer(cfg.tokenizer)
    task.build_bpe(cfg.bpe)
    return task, models


def batches(cfg: Any, task: Any, models: list[Any]) -> Any:
    """Iterate over the subset in fairseq's batches, on the models' device, without sentences longer than they take."""
    iterator = task.get_batch_iterator(
        dataset=task.dataset(cfg.dataset.gen_subset),
        max_tokens=cfg.dataset.max_tokens,
        max_sentences=cfg.dataset.batch_size,
        max_positions=utils.resolve_max_positions(task.max_positions(), *[m.max_positions() for m in models]),
        ignore_invalid_inputs=True,
    ).next_epoch_itr(shuffle=False)
    on_gpu = next(models[0].parameters()).is_cuda
    for sample in tqdm(iterator, desc=cfg.dataset.gen_subset, unit="batch", disable=cfg.common.no_progress_bar):
        yield utils.move_to_cuda(sample) if on_gpu else sample


def decode(cfg: Any, task: Any, models: list[Any], generators: dict[str, Any]) -> Decodings:
    """Decode the subset with every generator.

    They take turns batch by batch, so that whatever else the machine is doing falls on all alike.

    Args:
        cfg: the configuration of a fairseq-generate.
        generators: by name of the system.
    """
    decodings = Decodings({name: System() for name in generators})
    to_text = detokeniser(cfg, task)
    for number, sample in enumerate(batches(cfg, task, models)):
        ids = sample["id"].tolist()
        for row, i in enumerate(ids):
            decodings.sources[i] = to_text(task.source_dictionary, sample["net_input"]["src_tokens"][row])
            decodings.references[i] = to_text(task.target_dictionary, sample["target"][row], True)
        if number == 0:  # warm up
            for generator in generators.values():
                task.inference_step(generator, models, sample)
        for name, generator in generators.items():
            start = time.perf_counter()
            best = [hypotheses[0]["tokens"] for hypotheses in task.inference_step(generator, models, sample)]
            system = decodings.systems[name]
            system.tokens += sum(len(tokens) for tokens in best)
            system.hypotheses |= {i: to_text(task.target_dictionary, tokens) for i, tokens in zip(ids, best)}
            system.seconds += time.perf_counter() - start
    return decodings


def detokeniser(cfg: Any, task: Any) -> Callable[..., str]:
    """Return a function from a dictionary and token ids to text, as fairseq-generate prints it.

    A reference's unknown tokens are written in a way that no hypothesis matches.
    """

    def to_text(dictionary: Any, tokens: torch.Tensor, reference: bool = False) -> str:
        tokens = utils.strip_pad(tokens, dictionary.pad()).int().cpu()
        text = dictionary.string(tokens, cfg.common_eval.post_process, escape_unk=reference)
        text = task.bpe.decode(text) if task.bpe is not None else text
        return task.tokenizer.decode(text) if task.tokenizer is not None else text

    return to_text
