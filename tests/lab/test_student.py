"""Phrase encoders of fewer layers, trained to the vectors of others."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairseq_ccpr.lab.student.model import PhraseStudent, PhraseStudentConfig, span_ends
from fairseq_ccpr.lab.student.training import (
    PhraseDistillation,
    PhraseDistillationConfig,
    PhraseDistillationTask,
)
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.phrase_finder import PhraseFinder, Segmentation
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.subwords import collate
from tests.helpers import USER_DIR, call, refused, run
from tests.small_models import Ccpr, World, Xpr, build_phrases, other_encoder, random_encoders
from tests.training.two_processes import gradient_of_two_processes

pytestmark = pytest.mark.full

VALID = re.compile(r"valid on 'valid' subset \| loss ([\d.]+) .*cosine ([\d.]+)")


def training(ccpr: Ccpr, save_dir: Path, updates: int, *extra: object) -> list[object]:
    words = f"--user-dir {USER_DIR}/lab/student --task phrase_distillation --arch phrase_student "
    words += "--criterion phrase_distillation --cpu --layers 1 "
    words += "--optimizer adam --lr 3e-3 --max-tokens 1500 --num-workers 0 --log-format simple "
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
    return PhraseStudent.build_model(
        PhraseStudentConfig(layers=layers), SimpleNamespace(teacher=teacher)
    ).eval()


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
    tokens = collate(
        [same.context.tokenizer.encode(text) for text in sentences(ccpr, 3)], same.context.tokenizer.pad
    )
    assert torch.equal(same(tokens), span_ends(teacher, tokens))
    trainable = {name.split(".")[0] for name, one in fewer.named_parameters() if one.requires_grad}
    assert (
        trainable == {"context", "align", "segment"}
        and not fewer.context.transformer.embed_tokens.weight.requires_grad
    )
    fewer.train()
    assert torch.equal(fewer(tokens), fewer(tokens))  # no dropout


def the_task(ccpr: Ccpr, folder: Path, **others: Any) -> PhraseDistillationTask:
    given = {
        "text": str(ccpr.pairs),
        "phrase_encoder": str(ccpr.checkpoint),
        "valid_sentences": 40,
        "seed": 1,
    }
    return PhraseDistillationTask(PhraseDistillationConfig(**{**given, "save_dir": str(folder), **others}))


def test_the_loss_equals_a_plain_reference(ccpr: Ccpr, tmp_path: Path) -> None:
    """In float64, a sentence at a time."""
    task = the_task(ccpr, tmp_path)
    teacher, o = task.teacher, task.teacher.dimension
    student, tokenizer = student_of(teacher, 1), teacher.context.tokenizer

    def values(encoder: PhraseEncoder, texts: list[str]) -> torch.Tensor:
        each = (torch.tensor([tokenizer.encode(text).ids]) for text in texts)
        with torch.no_grad():
            return torch.cat([span_ends(encoder, tokens)[0, 1:-1].double() for tokens in each])

    for split in ("train", "valid"):
        task.load_dataset(split)
    held_out = values(teacher, task.dataset("valid").texts)
    torch.testing.assert_close(task.variances.double(), held_out.var(dim=0), rtol=1e-3, atol=1e-6)
    dataset = task.dataset("train")
    loss, count, logged = PhraseDistillation(task)(
        student, dataset.collater([dataset[row] for row in range(7)])
    )
    found, wanted = (values(one, dataset.texts[:7]) for one in (student, teacher))
    unexplained = ((found - wanted) ** 2 / held_out.var(dim=0)).sum(dim=0).tolist()
    of_segments = [unexplained.pop(place) for place in (2 * o + 1, o)]
    plain = sum(unexplained) / (2 * o) + sum(of_segments) / 2 / 8
    assert count == len(found) and loss.item() == pytest.approx(plain, rel=1e-3) and plain > 0.001
    alone = [ends[:, :o] + ends[:, o + 1 : -1] + teacher.align.bias for ends in (found, wanted)]
    assert float(logged["cosine"]) == pytest.approx(float(torch.cosine_similarity(*alone).sum()), rel=1e-4)


def test_two_processes_have_the_gradient_of_one(ccpr: Ccpr, tmp_path: Path) -> None:
    task = the_task(ccpr, tmp_path)
    task.load_dataset("train")
    assert task.variances.min() > 0  # as one process would
    student = student_of(task.teacher, 1)
    assert "align.weight" in gradient_of_two_processes(
        student, PhraseDistillation(task), task.dataset("train"), tmp_path
    )


def test_a_batch_of_one_subword(ccpr: Ccpr, tmp_path: Path) -> None:
    task = the_task(ccpr, tmp_path)
    subwords = task.teacher.context.tokenizer.encode("a")
    assert subwords.count == 1
    task.load_dataset("valid")
    loss, count, _ = PhraseDistillation(task)(
        student_of(task.teacher, 1), task.dataset("valid").collater([subwords])
    )
    assert count == 1 and 0 < loss.item() < 10


def test_cells_of_text_are_sentences_once_each(ccpr: Ccpr, tmp_path: Path) -> None:
    rows = [("ein Haus", "a house"), ("  ", "a house"), ("so " * 300, "and"), ("ein Tag", "a day")]
    (tmp_path / "one.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in rows), encoding="utf-8")
    (tmp_path / "two.txt").write_text("a day\n\na night\n", encoding="utf-8")
    task = the_task(ccpr, tmp_path, text=f"{tmp_path}/one.tsv:{tmp_path}/two.txt", valid_sentences=2)
    for split in ("train", "valid"):
        task.load_dataset(split)
    assert task.dataset("valid").texts == ["ein Haus", "a house"]
    assert task.dataset("train").texts == ["and", "ein Tag", "a day", "a night"]


def test_training_comes_near_to_the_teacher(trained: Trained, ccpr: Ccpr) -> None:
    found = [tuple(map(float, one)) for one in VALID.findall(trained.log)]
    assert len(found) > 1 and found[-1][0] < 0.7 * found[0][0] and found[-1][1] > found[0][1]
    teacher, student = PhraseEncoder.load(ccpr.checkpoint), PhraseEncoder.load(trained.checkpoint)
    assert (student.context.layers, student.edges, student.similarity) == (1, teacher.edges, "cosine")
    texts = sentences(ccpr, 30)
    untrained, learned = (cosines(teacher, one, texts).mean() for one in (student_of(teacher, 1), student))
    assert 1 - learned < 0.6 * (1 - untrained)


def test_it_builds_and_decodes_as_any_other(
    trained: Trained, ccpr: Ccpr, world: World, tmp_path: Path
) -> None:
    text = [target for _, target in read_pairs(ccpr.pairs)][:60]
    (tmp_path / "mono.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
    student = Ccpr(ccpr.pairs, ccpr.context, ccpr.phrases, trained.checkpoint, "")
    build_phrases(student, tmp_path / "mono.txt", tmp_path / "store")
    words = [
        "--path",
        world.model,
        "--data",
        world.data_bin,
        "--cpu",
        "--max-len-b",
        30,
        "--phrases-min-similarity",
        0,
    ]
    (tmp_path / "in.txt").write_text("Und Gott sprach zu Noah.\n", encoding="utf-8")
    asked = ["translate", *words, "--datastore", tmp_path / "store", "--input", tmp_path / "in.txt"]
    shown = call(*asked)
    assert PhraseEncoder.load(trained.checkpoint).fingerprint()[:12] in shown.stderr and shown.stdout.strip()
    refused(
        call(*asked, "--phrases-encoder", ccpr.checkpoint, check=False), "with another encoder"
    )  # the vectors are its own


def test_a_stopped_training_resumes(trained: Trained, ccpr: Ccpr, tmp_path: Path) -> None:
    call(*training(ccpr, tmp_path / "run", 25))
    log = run(*training(ccpr, tmp_path / "run", 60)).stdout
    assert re.search(r"Loaded checkpoint .*run/checkpoint_last.pt .*@ 25 updates", log)
    again, before = (
        torch.load(path / "checkpoint_last.pt")["model"]
        for path in (tmp_path / "run", trained.checkpoint.parent)
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.items())


def test_half_precision_changes_little(trained: Trained, ccpr: Ccpr, tmp_path: Path) -> None:
    """That of the checkpoint which is kept, and a student of a student."""
    shutil.copytree(trained.checkpoint.parent, tmp_path / "kept", ignore=shutil.ignore_patterns("*.pt"))
    run("scripts/recipes/halve_checkpoint.py", trained.checkpoint, kept := tmp_path / "kept/ccpr.pt")
    whole, half = (PhraseEncoder.load(path) for path in (trained.checkpoint, kept))
    assert cosines(whole, half, sentences(ccpr, 10)).min() > 0.999
    call(*training(ccpr, tmp_path / "again", 1, "--phrase-encoder", kept))
    assert PhraseEncoder.load(tmp_path / "again/checkpoint_last.pt").context.layers == 1


def test_bad_input(ccpr: Ccpr, xpr: Xpr, tmp_path: Path) -> None:
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
    refused(trains("--phrase-encoder", xpr.checkpoint), "a XprEncoder rather than a PhraseEncoder")
    refused(trains("--layers", 3), "--layers 3: the encoder has 2, give 1 to 2")
    refused(trains("--layers", 0), "--layers 0: the encoder has 2, give 1 to 2")
    refused(trains("--save-dir", ccpr.checkpoint.parent), "is the folder of --phrase-encoder: give another")
    (tmp_path / "of-others").mkdir()
    dot = random_encoders(tmp_path / "of-others")["cpr"]
    refused(trains("--phrase-encoder", dot), "compares phrases by dot: give one that compares them by cosine")
    call(*training(ccpr, tmp_path / "run", 1))
    other = other_encoder(ccpr, tmp_path / "other")
    refused(trains("--phrase-encoder", other, "--max-update", 2), "run does not hold a student of .*other")
    refused(
        trains("--layers", 2, "--max-update", 2),
        "run does not hold a student of .* with --layers 2: give those",
    )
