"""The pipeline of an experiment: turns its settings into stages, each a command with its inputs and outputs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_ccpr.lab.experiments.config import ExperimentConfig, MineConfig, TokensConfig
from fairseq_ccpr.lab.experiments.stages import PACKAGE, FileArguments, Stage, Word
from fairseq_ccpr.lab.sentence_encoders import E5, MUSE

COMMANDS, TRAINING = "fairseq_ccpr", "fairseq_cli.train"  # modules
# scripts/recipes/ read them, too; fairseq takes the later of two options, so those of an experiment win.
ENCODER_TRAINING = Path(__file__).with_name("encoder_training.options")
FINE_TUNING = ENCODER_TRAINING.with_name("fine_tuning.options")
TABLES = (".tsv", ".gz", ".xz")


@dataclass(frozen=True)
class Dependency:
    """A file or folder that a command reads, and where it comes from."""

    path: str = ""  # in the command line; a dependency that no word names needs none
    needs: tuple[Stage, ...] = ()  # the stages that make it
    inputs: tuple[tuple[str, str], ...] = ()  # or the settings that name it, and the paths they name

    @classmethod
    def given(cls, setting: str, path: str) -> Dependency:
        """Depend on what a setting names."""
        return cls(path, inputs=((setting, path),))


class Plan:
    """The stages of an experiment. Commands that are the same are one stage, named for the first system that has it."""

    def __init__(self, config: ExperimentConfig, folder: Path, output: Path) -> None:
        self.config, self.folder, self.output = config, folder, output.resolve()
        self._stages: dict[tuple[str, ...], Stage] = {}
        self._model = Dependency.given("model.path", config.model.path)
        self._languages = ["-s", config.model.source_lang, "-t", config.model.target_lang]
        for domain in config.domains:  # all of them, so that names do not depend on which are asked for
            for system in config.systems_of(domain):
                self.decode(system, domain)

    def _add(
        self,
        name: str,
        command: str,
        words: Sequence[Word],
        to: Sequence[Word],
        outputs: list[Path],
        *reads: Dependency,
        optional: Sequence[Path] = (),
    ) -> Stage:
        """Return the stage of a command: a new one, unless another has the same words; `to` says where outputs go."""
        key = (command, *map(str, words))
        if key not in self._stages:
            needs = list({need.name: need for one in reads for need in one.needs}.values())
            inputs = [given for one in reads for given in one.inputs]
            training = command == TRAINING
            line = [*(() if training else command.split()), *words, *to]
            self._stages[key] = Stage(
                name,
                TRAINING if training else COMMANDS,
                line,
                outputs,
                needs,
                inputs,
                resumes=training or command.startswith("build"),
                optional=list(optional),
            )
        return self._stages[key]

    def data(self, domain: str) -> Dependency:
        """Return the DATA_BIN of a domain, given or prepared."""
        given, model = self.config.domains[domain], self.config.model
        if given.data_bin is not None:
            return Dependency.given(f"domains.{domain}.data_bin", given.data_bin)
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
        reads = Dependency(needs=needs, inputs=tuple(inputs))
        stage = self._add(f"prepare/{domain}", "prepare", words, ["--output", str(output)], [output], reads)
        return Dependency(str(output), needs=(stage,))

    def _mined(self, domain: str, settings: MineConfig) -> Stage:
        key, output = f"domains.{domain}.text.mine", self.output / "mined" / f"{domain}.tsv"
        given = {name: getattr(settings, name) for name in ("source", "target", "tune")}
        paths = {name: path for name, path in given.items() if path is not None}
        inputs = [(f"{key}.{name}", path) for name, path in paths.items()]
        if settings.encoder not in (MUSE, E5):
            inputs.append((f"{key}.encoder", settings.encoder))
        words = [word for name, path in paths.items() for word in (f"--{name}", path)]
        words += ["--encoder", settings.encoder, *shlex.split(settings.options)]
        to, outputs = ["--output", str(output), "--quiet"], [output]
        if settings.tune is not None:
            outputs.append(output.with_suffix(".json"))
            to += ["--settings", str(outputs[-1])]
        return self._add(f"mine/{domain}", "mine", words, to, outputs, Dependency(inputs=tuple(inputs)))

    def encoder(self, given: str | None) -> Dependency:
        """Return the phrase encoder: the one that is given, or else the experiment's."""
        path = given or self.config.encoder
        return Dependency.given("encoder", path) if path else self._trained_encoder()

    def _trained_encoder(self) -> Dependency:
        settings = self.config.train_encoder
        assert settings is not None
        home, updates = self.output / "encoder", settings.updates
        if settings.start_from is not None:
            start = Dependency.given("train_encoder.start_from", settings.start_from)
        else:
            words, to = shlex.split(settings.convert_options), home / "start"
            stage = self._add("encoder/start", "convert", words, ["--output", str(to), "--quiet"], [to])
            start = Dependency(str(to), needs=(stage,))
        pairs = []
        for name, path in settings.texts.items():
            text = Dependency.given(f"train_encoder.texts.{name}", path)
            words, to = (
                ["--pairs", text.path, *self._languages, *shlex.split(settings.extract_options)],
                home / name,
            )
            stage = self._add(
                f"encoder/pairs-{name}", "extract", words, ["--output", str(to), "--quiet"], [to], text
            )
            pairs.append(Dependency(str(to), needs=(stage,)))
        words = [":".join(pair.path for pair in pairs), "--user-dir", str(PACKAGE), "--encoder", start.path]
        words += [
            *ENCODER_TRAINING.read_text(encoding="utf-8").split(),
            "--warmup-updates",
            str(updates // 10),
        ]
        words += [
            "--total-num-update",
            str(updates),
            "--max-update",
            str(updates),
            *shlex.split(settings.options),
        ]
        to = home / "checkpoints"
        stage = self._add("encoder/train", TRAINING, words, ["--save-dir", str(to)], [to], start, *pairs)
        return Dependency(str(to / "checkpoint_best.pt"), needs=(stage,))

    def model(self, name: str, home: str) -> Dependency:
        """Return the translation model of a system: the experiment's, or that one trained on the pairs of a domain."""
        settings = self.config.system(name).fine_tune
        if settings is None:
            return self._model
        data, to = self.data(home), self.output / "models" / home / name
        words = [
            data.path,
            *self._languages,
            "--user-dir",
            str(PACKAGE),
            "--finetune-from-model",
            self._model.path,
        ]
        words += shlex.split(FINE_TUNING.read_text(encoding="utf-8"))
        words += ["--stop-time-hours", str(settings.minutes / 60)]
        words += [*shlex.split(self.config.model.training_options), *shlex.split(settings.options)]
        stage = self._add(
            f"fine-tune/{home}/{name}", TRAINING, words, ["--save-dir", str(to)], [to], self._model, data
        )
        return Dependency(str(stage.outputs[0] / "checkpoint_best.pt"), needs=(stage,))

    def datastores(self, name: str, domain: str) -> list[tuple[str, Stage]]:
        """Return the parts (tokens, phrases, text) of the datastore a system translates a domain with, and their stages."""
        system = self.config.system(name)
        home = system.stores_from or domain
        parts = []
        if system.tokens is not None:
            parts.append(("tokens", self._tokens(name, home, system.tokens)))
        if system.phrases is not None:
            encoder = self.encoder(system.phrases.encoder)
            given = system.phrases.texts or self.config.domains[home].monolingual
            key = f"systems.{name}.phrases.texts" if system.phrases.texts else f"domains.{home}.monolingual"
            texts = [Dependency.given(key, path) for path in given]
            words = [*given, "--encoder", encoder.path]
            words += [*_share(system.phrases.share), *shlex.split(system.phrases.options)]
            parts.append(("phrases", self._store("phrases", name, home, words, encoder, *texts)))
        if system.text is not None:
            own, general = self.config.domains[home].monolingual, system.text.against
            texts = [Dependency.given(f"domains.{home}.monolingual", path) for path in own]
            texts += [Dependency.given(f"systems.{name}.text.against", path) for path in general]
            data, model = self.data(home), self.model(name, home)
            words = [*own, "--path", model.path, "--data", data.path, *self._languages]
            words += [*shlex.split(self.config.model.subwords), *(["--against", *general] if general else [])]
            parts.append(("text", self._store("text", name, home, words, data, model, *texts)))
        return parts

    def _tokens(self, name: str, home: str, settings: TokensConfig) -> Stage:
        data, model = self.data(home), self.model(name, home)
        words = [data.path, "--path", model.path, *self._languages, *_share(settings.share)]
        reads = [data, model]
        if settings.raw is not None:
            other = self.config.system(settings.raw).tokens
            assert other is not None
            raw = self._tokens(settings.raw, home, other)
            words += ["--raw-datastore", str(raw.outputs[0])]
            reads.append(Dependency(needs=(raw,)))
        if settings.reverse_model is not None:
            texts = self.config.domains[home].monolingual
            words += ["--monolingual", *texts, "--reverse-model", settings.reverse_model]
            reads.append(Dependency.given(f"systems.{name}.tokens.reverse_model", settings.reverse_model))
            reads += [Dependency.given(f"domains.{home}.monolingual", path) for path in texts]
        return self._store("tokens", name, home, [*words, *shlex.split(settings.options)], *reads)

    def _store(self, part: str, name: str, home: str, words: list[str], *reads: Dependency) -> Stage:
        output = self.output / "stores" / home / f"{part}.{name}"
        to = ["--output", str(output), "--quiet"]
        return self._add(f"{part}/{home}/{name}", f"build {part}", words, to, [output], *reads)

    def _decoding(self, name: str, domain: str) -> tuple[list[Word], list[Dependency]]:
        system, settings, data = self.config.system(name), self.config.model, self.data(domain)
        model = self.model(name, system.stores_from or domain)
        words: list[Word] = [data.path, "--path", model.path, *self._languages]
        words += [*shlex.split(settings.subwords), *shlex.split(settings.options)]
        stores = [store for _, store in self.datastores(name, domain)]
        reads = [data, model, Dependency(needs=tuple(stores))]
        if stores:
            words += ["--datastore", ":".join(str(store.outputs[0]) for store in stores)]
        if system.phrases is not None:
            encoder = self.encoder(system.phrases.encoder)
            words += ["--phrases-encoder", encoder.path]
            reads.append(encoder)
        return words, reads

    def tune(self, name: str, domain: str) -> Stage | None:
        """Return the stage that tunes a system for a domain, on its valid set or another domain's; None without tuning."""
        system = self.config.system(name)
        if not (system.tune and self.config.has_store(name)):
            return None
        home = system.tuned_on(domain)
        words, reads = self._decoding(name, home)
        words += [*shlex.split(system.options), *shlex.split(self.config.tune_options)]
        words += shlex.split(system.tune_options)
        others = [self.data(other) for other in system.also]
        words += ["--also", *(other.path for other in others)] if others else []
        output = self.output / "tuned" / home / f"{name}.options"
        to = ["--output", str(output), "--no-progress-bar"]
        trust = output.with_name(f"{output.name}.trust")
        return self._add(
            f"tune/{home}/{name}", "tune", words, to, [output], *reads, *others, optional=[trust]
        )

    def decode(self, name: str, domain: str) -> Stage:
        """Return the stage that translates a domain's test set with a system, and with the base model in turns."""
        words, reads = self._decoding(name, domain)
        tuned = self.tune(name, domain)
        if tuned is not None:
            words.append(FileArguments(tuned.outputs[0]))
            reads.append(Dependency(needs=(tuned,)))
        words += shlex.split(self.config.system(name).options)
        output = self.output / "decoded" / domain / name
        to = ["--results-path", str(output), "--no-progress-bar"]
        # Systems that are the same but for their names are decoded apart, for their tables.
        return self._add(f"decode/{domain}/{name}", "compare", [*words, *to], [], [output], *reads)

    def translation(self, name: str, domain: str) -> Path:
        """Return the file of a system's translation."""
        kind = "retrieval" if self.config.has_store(name) else "base"
        return self.decode(name, domain).outputs[0] / f"{kind}.txt"

    def comparisons(self, domain: str, names: list[str]) -> dict[str, Stage]:
        """Return the stages that compare these systems of a domain, by the system they are compared with."""
        base = self.config.systems_of(domain)[0]
        stages = {base: self.score(names, domain)}
        for other in names:
            compared = [name for name in names if self.config.system(name).against == other]
            if compared and other != base:
                stages[other] = self.score([other, *compared], domain, other)
        return stages

    def score(self, names: list[str], domain: str, against: str | None = None) -> Stage:
        """Return the stage that compares systems with the first; `against` is its name unless it is the base model."""
        given = self.config.domains[domain].references
        base = self.config.systems_of(domain)[0]
        reference, *more = given or [str(self.decode(base, domain).outputs[0] / "reference.txt")]
        words = [
            reference,
            *(f"{name}={self.translation(name, domain)}" for name in names),
            *self._languages[2:],
        ]
        words += [
            "--samples",
            str(self.config.bootstrap_samples),
            *(["--more-references", *more] if more else []),
        ]
        output = (
            self.output / "scores" / (f"{domain}.against.{against}.json" if against else f"{domain}.json")
        )
        inputs = tuple((f"domains.{domain}.references", path) for path in given)
        unlike = self.config.domains[domain].unlike
        if unlike is not None:
            words += ["--unlike", unlike]
            inputs += ((f"domains.{domain}.unlike", unlike),)
        decoded = tuple(self.decode(name, domain) for name in dict.fromkeys([base, *names]))
        return self._add(
            f"score/{output.stem}",
            "evaluate systems",
            words,
            ["--json", str(output)],
            [output],
            Dependency(needs=decoded, inputs=inputs),
        )


def _share(share: float) -> list[str]:
    return ["--fraction", f"{share:g}"] if share < 1 else []
