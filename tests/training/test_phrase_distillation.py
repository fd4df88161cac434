"""Phrase encoders of fewer layers, trained to the vectors of others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairseq_ccpr.models.phrase_encoder import PhraseEncoder, PhraseStudent, PhraseStudentConfig, span_ends
from fairseq_ccpr.models.phrase_finder import PhraseFinder, Segmentation
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.subwords import collate
from fairseq_ccpr.training.phrase_distillation import PhraseDistillation, Sentences
from tests.helpers import USER_DIR, call, refused, run
from tests.small_models import Ccpr, World, build_phrases, other_encoder, random_encoders

VALID = re.compile(r"valid on 'valid' subset \| loss ([\d.]+) .*cosine ([\d.]+)")


def training(ccpr: Ccpr, save_dir: Path, updates: int, *extra: object) -> list[object]:
    words = (
        f"--user-dir {USER_DIR} --task phrase_distillation --arch phrase_student --criterion phrase_distillation --cpu "
    )
    words += "--layers 1 --optimizer adam --lr 3e-3 --max-tokens 1500 --num-workers 0 --log-format simple "
    words += "--valid-sentences 40 --no-epoch-checkpoints"
    what = ["--text", ccpr.pairs, "--phrase-encoder", ccpr.checkpoint]
    return ["fairseq-train", *words.split(), *what, "--save-dir", save_dir, "--max-update", updates, *extra]


@dataclass
class Trained:
    """A student, and what its training logged."""

    checkpoint: Path
    log: str


@pytest.fixture(scope="module")
def trained(ccpr: Ccpr, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("student")
    return Trained(folder / "checkpoint_best.pt", run(*training(ccpr, folder, 60)).stdout)


def sentences(ccpr: Ccpr, count: int) -> list[str]:
    return [source for source, _ in read_pairs(ccpr.pairs)][:count]


def student_of(teacher: PhraseEncoder, layers: int) -> PhraseStudent:
    return PhraseStudent.build_model(PhraseStudentConfig(layers=layers), SimpleNamespace(teacher=teacher)).eval()


def cosines(one: PhraseEncoder, other: PhraseEncoder, texts: list[str]) -> torch.Tensor:
    found = [PhraseFinder(encoder, Segmentation("all", max_words=3)).find(texts) for encoder in (one, other)]
    assert (found[0].spans == found[1].spans).all()
    return (found[0].vectors * found[1].vectors).sum(dim=1)


def test_span_ends_are_what_vectors_and_log_odds_are_sums_of(ccpr: Ccpr) -> None:
    encoder = PhraseEncoder.load(ccpr.checkpoint)
    tokens = collate(
        [encoder.context.tokenizer.encode(text) for text in sentences(ccpr, 3)], encoder.context.tokenizer.pad
    )
    states, spans = encoder.states(tokens), torch.tensor([[0, 1, 1], [2, 1, 4], [1, 2, 3]])
    ends, o = span_ends(encoder, tokens), encoder.dimension
    sentence, first, last = spans.unbind(dim=1)
    sums = ends[sentence, first, : o + 1] + ends[sentence, last, o + 1 :]
    vectors = torch.nn.functional.normalize(sums[:, :o] + encoder.align.bias, dim=1)
    torch.testing.assert_close(vectors, encoder.vectors(states, spans))
    torch.testing.assert_close(sums[:, o] + encoder.segment.bias, encoder.phrase_logits(states, spans))


def test_a_student_of_all_layers_is_its_teacher(ccpr: Ccpr) -> None:
    teacher = PhraseEncoder.load(ccpr.checkpoint)
    assert teacher.context.layers == 2
    same, fewer = student_of(teacher, 2), student_of(teacher, 1)
    assert same.fingerprint() == teacher.fingerprint() != fewer.fingerprint() and fewer.context.layers == 1
    tokens = collate([same.context.tokenizer.encode(text) for text in sentences(ccpr, 3)], same.context.tokenizer.pad)
    assert torch.equal(same(tokens), span_ends(teacher, tokens))
    trainable = {name.split(".")[0] for name, one in fewer.named_parameters() if one.requires_grad}
    assert (
        trainable == {"context", "align", "segment"} and not fewer.context.transformer.embed_tokens.weight.requires_grad
    )
    fewer.train()
    assert torch.equal(fewer(tokens), fewer(tokens))  # no dropout


def test_the_loss_equals_a_plain_reference(ccpr: Ccpr) -> None:
    """In float64, a value of the vectors or of segmentation at a time."""
    teacher = PhraseEncoder.load(ccpr.checkpoint)
    student, tokenizer, o = student_of(teacher, 1), teacher.context.tokenizer, teacher.dimension
    dataset = Sentences(sentences(ccpr, 7), tokenizer, 200)
    sample = dataset.collater([dataset[row] for row in range(7)])
    task: Any = SimpleNamespace(teacher=teacher, teach=lambda tokens: span_ends(teacher, tokens))
    loss, count, logged = PhraseDistillation(task)(student, sample)
    with torch.no_grad():
        rows = [
            [span_ends(encoder, torch.tensor([subwords.ids]))[0, 1:-1].double() for encoder in (student, teacher)]
            for subwords in map(tokenizer.encode, sentences(ccpr, 7))
        ]
    found, wanted = (torch.cat(column) for column in zip(*rows))
    unexplained = [
        float(((found[:, i] - wanted[:, i]) ** 2).mean() / ((wanted[:, i] - wanted[:, i].mean()) ** 2).mean())
        for i in range(2 * (o + 1))
    ]
    of_segments = [unexplained.pop(place) for place in (2 * o + 1, o)]
    plain = sum(unexplained) / (2 * o) + sum(of_segments) / 2 / 8
    assert count == 7 and loss.item() == pytest.approx(7 * plain, rel=1e-4) and plain > 0.01
    alone = [torch.cosine_similarity(*(e[:, :o] + e[:, o + 1 : -1] + teacher.align.bias for e in (found, wanted)))]
    assert float(logged["cosine"]) == pytest.approx(7 * float(alone[0].mean()), rel=1e-4)


def test_training_comes_near_to_the_teacher(trained: Trained, ccpr: Ccpr) -> None:
    found = [tuple(map(float, one)) for one in VALID.findall(trained.log)]
    assert len(found) > 1 and found[-1][0] < 0.7 * found[0][0] and found[-1][1] > found[0][1]
    teacher, student = PhraseEncoder.load(ccpr.checkpoint), PhraseEncoder.load(trained.checkpoint)
    assert (student.context.layers, student.edges, student.similarity) == (1, teacher.edges, "cosine")
    texts = sentences(ccpr, 30)
    untrained, learned = (cosines(teacher, one, texts).mean() for one in (student_of(teacher, 1), student))
    assert 1 - learned < 0.6 * (1 - untrained)


def test_it_builds_and_decodes_as_any_other(trained: Trained, ccpr: Ccpr, world: World, tmp_path: Path) -> None:
    text = [target for _, target in read_pairs(ccpr.pairs)][:60]
    (tmp_path / "mono.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
    student = Ccpr(ccpr.pairs, ccpr.context, ccpr.phrases, trained.checkpoint, "")
    build_phrases(student, tmp_path / "mono.txt", tmp_path / "store")
    words = ["--path", world.model, "--data", world.data_bin, "--cpu", "--max-len-b", 30, "--phrase-min-similarity", 0]
    (tmp_path / "in.txt").write_text("Und Gott sprach zu Noah.\n", encoding="utf-8")
    asked = ["translate", *words, "--datastore", tmp_path / "store", "--input", tmp_path / "in.txt"]
    shown = call(*asked)
    assert PhraseEncoder.load(trained.checkpoint).fingerprint()[:12] in shown.stderr and shown.stdout.strip()
    refused(call(*asked, "--phrase-encoder", ccpr.checkpoint, check=False), "encoder")  # the vectors are its own


def test_a_killed_training_resumes(trained: Trained, ccpr: Ccpr, tmp_path: Path) -> None:
    call(*training(ccpr, tmp_path / "run", 25, "--save-interval-updates", 25))
    call(*training(ccpr, tmp_path / "run", 60))
    again, before = (
        torch.load(path / "checkpoint_last.pt")["model"] for path in (tmp_path / "run", trained.checkpoint.parent)
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.items())


def test_bad_input(ccpr: Ccpr, tmp_path: Path) -> None:
    def trains(*extra: object) -> Any:
        return call(*training(ccpr, tmp_path / "run", 1, *extra), check=False)

    refused(trains("--text", ""), "--text is missing")
    refused(trains("--text", tmp_path / "no.txt"), "--text: there is no file .*no.txt")
    refused(
        trains("--valid-sentences", 5000),
        "--text has [0-9]+ sentences, of which --valid-sentences holds out 5,000: give",
    )
    refused(trains("--valid-sentences", 0), "--valid-sentences is 0: give at least 1")
    refused(trains("--phrase-encoder", tmp_path / "no.pt"), "there is no phrase encoder .*no.pt")
    refused(trains("--layers", 3), "--layers 3: the encoder has 2, give 1 to 2")
    (tmp_path / "of-others").mkdir()
    dot = random_encoders(tmp_path / "of-others")["cpr"]
    refused(trains("--phrase-encoder", dot), "compares phrases by dot: give one that compares them by cosine")
    call(*training(ccpr, tmp_path / "run", 1))
    other = other_encoder(ccpr, tmp_path / "other")
    refused(trains("--phrase-encoder", other, "--max-update", 2), "run does not hold a student of .*other")
