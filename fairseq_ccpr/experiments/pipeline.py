"""From an experiment's settings to its stages: which command makes what, out of what."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_ccpr.experiments.commands import PACKAGE
from fairseq_ccpr.experiments.config import ExperimentConfig, MineConfig, TokensConfig
from fairseq_ccpr.experiments.stages import Contents, Stage, Word
from fairseq_ccpr.models.pretrained.sentence_encoders import E5, MUSE

COMMANDS = "fairseq_ccpr.cli"
# What scripts/recipes/train_ccpr.sh says, too; fairseq takes the later of two, so options can change any of them.
ENCODER_TRAINING = (
    "--task phrase_contrast --arch phrase_encoder --criterion ccpr "
    "--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --optimizer adam --weight-decay 0.01 --lr 3e-4 "
    "--lr-scheduler polynomial_decay --clip-norm 1 --max-tokens 2000 --max-tokens-valid 4000 --save-interval-updates 250 "
    "--validate-interval-updates 500 --keep-interval-updates 1 --no-epoch-checkpoints --log-format simple --log-interval 25 "
    "--num-workers 0"
)
TABLES = (".tsv", ".gz", ".xz")


@dataclass(frozen=True)
class Source:
    """Something that a command reads: how it is called, and where it comes from."""

    word: str
    needs: tuple[Stage, ...] = ()  # the stages that make it
    inputs: tuple[tuple[str, str], ...] = ()  # or the settings and the paths that give it


class Plan:
    """The stages of an experiment. Commands that are the same are one stage, named for the first system that has it.

    Args:
        config: the experiment.
        folder: where its commands run, and its paths begin.
        output: what is made goes below it.
    """

    def __init__(self, config: ExperimentConfig, folder: Path, output: Path) -> None:
        self.config, self.folder, self.output = config, folder, output.resolve()
        self._stages: dict[tuple[str, ...], Stage] = {}
        self._model = Source(config.model.path, inputs=(("model.path", config.model.path),))
        self._languages = ["-s", config.model.source_lang, "-t", config.model.target_lang]
        for domain in config.domains:  # all of them, so that names do not depend on which are asked for
            for system in config.systems_of(domain):
                self.decode(system, domain)

    def _add(
        self, name: str, command: str, words: Sequence[Word], to: Sequence[Word], outputs: list[Path], *sources: Source
    ) -> Stage:
        """The stage of a command, which is a new one unless another has the same words.

        Args:
            words: of its command line, but for
            to: those that say where the outputs go.
            sources: what it reads.
        """
        key = (command, *map(str, words))
        if key not in self._stages:
            needs = list({need.name: need for source in sources for need in source.needs}.values())
            inputs = [given for source in sources for given in source.inputs]
            module = command if "." in command else f"{COMMANDS}.{command}"
            resumes = command in ("build_datastore", "fairseq_cli.train")
            self._stages[key] = Stage(name, module, [*words, *to], outputs, needs, inputs, resumes)
        return self._stages[key]

    def data(self, domain: str) -> Source:
        """The DATA_BIN of a domain."""
        given, model = self.config.domains[domain], self.config.model
        if given.data_bin is not None:
            return Source(given.data_bin, inputs=((f"domains.{domain}.data_bin", given.data_bin),))
        assert given.text is not None
        inputs = [("model.dictionary", path) for path in model.dictionary]
        words: list[Word] = [*self._languages, *shlex.split(model.subwords), "--dict", *model.dictionary]
        needs: tuple[Stage, ...] = ()
        if given.text.mine is not None:
            mined = self._mined(domain, given.text.mine)
            needs = (mined,)
            words += ["--train", str(mined.outputs[0])]
        for subset in ("train", "valid", "test"):
            path = getattr(given.text, subset)
            if path is None:
                continue
            table = Path(path).suffix in TABLES or (self.folder / path).is_file()
            files = [path] if table else [f"{path}.{language}" for language in self._languages[1::2]]
            inputs += [(f"domains.{domain}.text.{subset}", file) for file in files]
            words += [f"--{subset}", path]
        output = self.output / "data" / domain
        stage = self._add(
            f"prepare/{domain}",
            "prepare_data",
            words,
            ["--output", str(output)],
            [output],
            Source("", needs=needs, inputs=tuple(inputs)),
        )
        return Source(str(output), needs=(stage,))

    def _mined(self, domain: str, settings: MineConfig) -> Stage:
        """The stage that finds a domain's training pairs."""
        key, output = f"domains.{domain}.text.mine", self.output / "mined" / f"{domain}.tsv"
        paths = {name: getattr(settings, name) for name in ("source", "target", "tune")}
        inputs = [(f"{key}.{name}", path) for name, path in paths.items()]
        if settings.encoder not in (MUSE, E5):
            inputs.append((f"{key}.encoder", settings.encoder))
        words = [word for name, path in paths.items() for word in (f"--{name}", path)]
        words += ["--encoder", settings.encoder, *shlex.split(settings.options)]
        chosen = output.with_suffix(".json")
        to = ["--settings", str(chosen), "--output", str(output), "--quiet"]
        return self._add(f"mine/{domain}", "mine_bitext", words, to, [output, chosen], Source("", inputs=tuple(inputs)))

    def encoder(self, given: str | None) -> Source:
        """The phrase encoder: one that is given, or else the experiment's."""
        path = given or self.config.encoder
        return Source(path, inputs=(("encoder", path),)) if path else self._trained_encoder()

    def _trained_encoder(self) -> Source:
        """A phrase encoder, by the steps of scripts/recipes/train_ccpr.sh."""
        settings = self.config.train_encoder
        assert settings is not None
        home, updates = self.output / "encoder", settings.updates
        texts = [Source(path, inputs=((f"train_encoder.texts.{name}", path),)) for name, path in settings.texts.items()]
        if settings.start_from is not None:
            start = Source(settings.start_from, inputs=(("train_encoder.start_from", settings.start_from),))
        else:
            words, to = shlex.split(settings.convert_options), home / "start"
            stage = self._add("encoder/start", "convert_encoder", words, ["--output", str(to), "--quiet"], [to])
            start = Source(str(to), needs=(stage,))
        pairs = []
        for name, text in zip(settings.texts, texts):
            words, to = ["--pairs", text.word, *self._languages, *shlex.split(settings.extract_options)], home / name
            stage = self._add(
                f"encoder/pairs-{name}", "extract_phrases", words, ["--output", str(to), "--quiet"], [to], text
            )
            pairs.append(Source(str(to), needs=(stage,)))
        words = [":".join(pair.word for pair in pairs), "--user-dir", str(PACKAGE), "--encoder", start.word]
        words += [*shlex.split(ENCODER_TRAINING), "--warmup-updates", str(updates // 10)]
        words += ["--total-num-update", str(updates), "--max-update", str(updates), *shlex.split(settings.options)]
        to = home / "checkpoints"
        stage = self._add("encoder/train", "fairseq_cli.train", words, ["--save-dir", str(to)], [to], start, *pairs)
        return Source(str(to / "checkpoint_best.pt"), needs=(stage,))

    def datastores(self, name: str, domain: str) -> list[tuple[str, Stage]]:
        """The parts, tokens and phrases, with which a system translates a domain, and the stages that build them."""
        system = self.config.system(name)
        home = system.stores_from or domain
        found = []
        if system.tokens is not None:
            found.append(("tokens", self._tokens(name, home, system.tokens)))
        if system.phrases is not None:
            encoder = self.encoder(system.phrases.encoder)
            given = system.phrases.texts or self.config.domains[home].monolingual
            key = f"systems.{name}.phrases.texts" if system.phrases.texts else f"domains.{home}.monolingual"
            texts = [Source(path, inputs=((key, path),)) for path in given]
            words = ["phrases", *given, "--encoder", encoder.word]
            words += [*_share(system.phrases.share), *shlex.split(system.phrases.options)]
            found.append(("phrases", self._store("phrases", name, home, words, encoder, *texts)))
        return found

    def _tokens(self, name: str, home: str, settings: TokensConfig) -> Stage:
        data = self.data(home)
        words = ["tokens", data.word, "--path", self._model.word, *self._languages, *_share(settings.share)]
        sources = [data, self._model]
        if settings.raw is not None:
            other = self.config.system(settings.raw).tokens
            assert other is not None
            raw = self._tokens(settings.raw, home, other)
            words += ["--raw-datastore", str(raw.outputs[0])]
            sources.append(Source("", needs=(raw,)))
        return self._store("tokens", name, home, [*words, *shlex.split(settings.options)], *sources)

    def _store(self, part: str, name: str, home: str, words: list[str], *sources: Source) -> Stage:
        output = self.output / "stores" / home / f"{part}.{name}"
        to = ["--output", str(output), "--quiet"]
        return self._add(f"{part}/{home}/{name}", "build_datastore", words, to, [output], *sources)

    def _decoding(self, name: str, domain: str) -> tuple[list[Word], list[Source]]:
        """The words that all decoding of a domain by a system has, and what it reads."""
        system, model, data = self.config.system(name), self.config.model, self.data(domain)
        words: list[Word] = [data.word, "--path", model.path, *self._languages]
        words += [*shlex.split(model.subwords), *shlex.split(model.options)]
        stores = [store for _, store in self.datastores(name, domain)]
        sources = [data, self._model, Source("", needs=tuple(stores))]
        if stores:
            words += ["--datastore", ":".join(str(store.outputs[0]) for store in stores)]
        if system.phrases is not None:
            encoder = self.encoder(system.phrases.encoder)
            words += ["--phrase-encoder", encoder.word]
            sources.append(encoder)
        return words, sources

    def tune(self, name: str, domain: str) -> Stage | None:
        """The stage that chooses a system's settings for a domain, on its own valid set or another's; None without tuning."""
        system = self.config.system(name)
        if not (system.tune and self.config.has_store(name)):
            return None
        home = system.tuned_on(domain)
        words, sources = self._decoding(name, home)
        words += [*shlex.split(system.options), *shlex.split(self.config.tune_options)]
        output = self.output / "tuned" / home / f"{name}.options"
        to, outputs = ["--output", str(output), "--no-progress-bar"], [output, output.with_name(f"{output.name}.png")]
        return self._add(f"tune/{home}/{name}", "tune_retrieval", words, to, outputs, *sources)

    def decode(self, name: str, domain: str) -> Stage:
        """The stage that translates a domain's test set with a system, and with the base model in turns."""
        words, sources = self._decoding(name, domain)
        tuned = self.tune(name, domain)
        if tuned is not None:
            words.append(Contents(tuned.outputs[0]))
            sources.append(Source("", needs=(tuned,)))
        words += shlex.split(self.config.system(name).options)
        output = self.output / "decoded" / domain / name
        to = ["--results-path", str(output), "--no-progress-bar"]
        # Systems that are the same but for their names are decoded apart, for their tables.
        return self._add(f"decode/{domain}/{name}", "compare_decoding", [*words, *to], [], [output], *sources)

    def translation(self, name: str, domain: str) -> Path:
        """Where a system's translation is."""
        kind = "retrieval" if self.config.has_store(name) else "base"
        return self.decode(name, domain).outputs[0] / f"{kind}.txt"

    def comparisons(self, domain: str, names: list[str]) -> dict[str, Stage]:
        """The stages that compare these systems of a domain: with its base model, and with others, by their names."""
        base = self.config.systems_of(domain)[0]
        found = {base: self.score(names, domain)}
        for other in names:
            compared = [name for name in names if self.config.system(name).against == other]
            if compared and other != base:
                found[other] = self.score([other, *compared], domain, other)
        return found

    def score(self, names: list[str], domain: str, against: str | None = None) -> Stage:
        """The stage that compares systems, each with the first; `against` names it in the output, if it is no base model."""
        given = self.config.domains[domain].references
        base = self.config.systems_of(domain)[0]
        reference, *more = given or [str(self.decode(base, domain).outputs[0] / "reference.txt")]
        words = [reference, *(f"{name}={self.translation(name, domain)}" for name in names)]
        words += ["--samples", str(self.config.bootstrap_samples), *(["--more-references", *more] if more else [])]
        output = self.output / "scores" / (f"{domain}.against.{against}.json" if against else f"{domain}.json")
        inputs = tuple((f"domains.{domain}.references", path) for path in given)
        needs = Source(
            "", needs=tuple(self.decode(name, domain) for name in dict.fromkeys([base, *names])), inputs=inputs
        )
        name = f"score/{domain}/{against}" if against else f"score/{domain}"
        return self._add(name, "compare_systems", words, ["--json", str(output)], [output], needs)


def _share(share: float) -> list[str]:
    return ["--share", f"{share:g}"] if share < 1 else []
