"""Scores by the language of what is scored."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sacrebleu.metrics import BLEU
from sacrebleu.tokenizers.tokenizer_base import BaseTokenizer

from fairseq_ccpr.evaluation import tune
from fairseq_ccpr.evaluation.test_set import MEAN, Decodings, SystemOutput, bleu_tokenizer, score
from fairseq_ccpr.lab.accuracy.significance import compare_systems
from tests.helpers import call, refused, write_lines

CHINESE = ["请先关闭电源，然后再拆下侧面的盖板。", "如果机器停止工作，请立即联系服务中心。"]
NEARLY = ["请先关闭电源，再拆下侧面的盖板。", "如果机器停止工作，请马上联系服务中心。"]
THAI = ["กรุณาปิดเครื่องก่อนถอดฝาครอบด้านข้างออก", "หากเครื่องหยุดทำงานโปรดติดต่อศูนย์บริการทันที"]


@pytest.mark.parametrize("language", ["zh", "zh_CN", "zho_Hans", "cmn", "zh-Hant", "zh-TW", "yue"])
def test_chinese_is_scored_as_sacrebleu_scores_it(language: str) -> None:
    found = score(NEARLY, CHINESE, language)
    wanted = BLEU(tokenize="zh").corpus_score(NEARLY, [CHINESE]).score
    assert found.bleu == round(wanted, 2) > 50 > BLEU().corpus_score(NEARLY, [CHINESE]).score
    assert (
        "|tok:zh|" in found.bleu_signature
        and found.metric == MEAN
        and found.deciding == (found.bleu + found.chrf) / 2
    )


@pytest.mark.parametrize("language", ["th", "tha_Thai", "lo", "km_KH", "mya", "bo"])
def test_without_a_tokenizer_characters_are_counted_and_chrf_decides(language: str) -> None:
    found = score([THAI[0], THAI[1][:-4]], THAI, language)
    assert "|tok:char|" in found.bleu_signature and found.metric == "chrF" and found.deciding == found.chrf


@pytest.mark.parametrize(
    ("language", "name", "module"), [("jpn", "ja-mecab", "ja"), ("ko_KR", "ko-mecab", "ko")]
)
def test_mecab_is_used_where_it_is_installed(
    language: str, name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sacrebleu's class of this tokenizer stands in for one whose dictionary is not installed here."""
    bleu_tokenizer.cache_clear()
    loaded = import_module(f"sacrebleu.tokenizers.tokenizer_{module}_mecab")
    kind = f"Tokenizer{module.capitalize()}Mecab"
    monkeypatch.setattr(loaded, kind, type(kind, (BaseTokenizer,), {"signature": lambda self: name}))
    assert bleu_tokenizer(language) == name

    def missing(self: object) -> None:
        raise RuntimeError("not installed")

    bleu_tokenizer.cache_clear()
    monkeypatch.setattr(loaded, kind, type(kind, (), {"__init__": missing}))
    assert bleu_tokenizer(language) == "char"
    bleu_tokenizer.cache_clear()


@pytest.mark.parametrize("language", ["de", "en_XX", "fra_Latn", "vi", "zh-Latn", "hi", "source", ""])
def test_others_are_scored_as_ever(language: str) -> None:
    both = ["one two three four", "five six seven eight"], ["one two three four", "five six seven nine"]
    assert score(*both, language) == score(*both) and "|tok:13a|" in score(*both, language).bleu_signature


def test_a_decoded_set_is_scored_by_the_target_language_and_tune_chooses_by_chrf() -> None:
    outputs = {"base": THAI[1][:20], "a": THAI[1][:-6], "b": THAI[1]}
    systems = {name: SystemOutput({0: text}) for name, text in outputs.items()}
    scores = {name: Decodings(systems, {}, {0: THAI[1]}, "th").scores(name) for name in systems}
    plain = SimpleNamespace(find=lambda kind: None, trust=None)
    tried: Any = [SimpleNamespace(name=name, ensemble=plain) for name in "ab"]
    system: Any = None
    trial = tune.Trial(system, [], tune.QUALITY, scores, dict.fromkeys(outputs, 1.0))
    assert trial.choose(tried).name == "b"
    assert {one.metric for one in scores.values()} == {"chrF"}
    assert Decodings(systems, {}, {0: THAI[1]}).scores("a").metric == MEAN


def test_systems_are_compared_by_the_language_that_is_given_or_seen(tmp_path: Path) -> None:
    files = [
        write_lines(tmp_path / name, *lines)
        for name, lines in (("r", CHINESE), ("a", NEARLY), ("b", CHINESE))
    ]
    wanted = compare_systems({"a": NEARLY, "b": CHINESE}, [CHINESE], 20, "zh")
    assert 50 < wanted.rows[0]["BLEU"] < 100 and wanted.rows[0]["TER"] < 50
    for words in ([], ["--tokenize", "zh"]):
        shown = call("evaluate systems", *files, *words).stdout
        assert "|tok:zh|" in shown and f"| {wanted.rows[0]['BLEU']:.2f} |" in shown
    assert "|tok:13a|" in call("evaluate systems", *files, "--tokenize", "13a").stdout
    done = call("evaluate systems", *files, "--tokenize", "ja-mecab", check=False)
    if importlib.util.find_spec("MeCab") is None:
        refused(
            done, "--tokenize ja-mecab is not installed: Japanese tokenization requires extra dependencies"
        )
