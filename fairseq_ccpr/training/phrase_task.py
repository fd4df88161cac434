"""What the tasks that train phrase encoders on pairs share, and the tokenizer next to their checkpoints."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import II

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.paths import split_paths
from fairseq_ccpr.text.subwords import SubwordTokenizer
from fairseq_ccpr.text.tokenizers import ENCODER_TOKENIZERS, load_tokenizer
from fairseq_ccpr.training.token_contrast import ContrastTask, ContrastTaskConfig


@dataclass
class PhraseTaskConfig(ContrastTaskConfig):
    """Options of other parts of fairseq that the tasks read; their own include at least `data` and `max_subwords`."""

    encoder: str = II("model.encoder")


class PhraseTask(ContrastTask):
    """A task whose model has a `ContextEncoder` as `context`, and whose data are folders with a train and a valid part."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        if not cfg.encoder:
            raise ConfigurationError("--encoder is not given: make one with fairseq-ccpr convert")
        self.tokenizer = load_tokenizer(Path(cfg.encoder))
        self.context_settings: dict[str, Any] = {}

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build the model, and save to `--save-dir` the files that its checkpoints need besides their weights."""
        model = super().build_model(cfg, from_checkpoint)
        context: ContextEncoder = model.context
        if self.cfg.max_subwords > context.max_positions:
            raise ConfigurationError(
                f"--max-subwords is {self.cfg.max_subwords}, but the encoder {self.cfg.encoder} takes {context.max_positions}"
            )
        self.context_settings = vars(context.arguments)
        save_tokenizer(self.tokenizer, Path(self.cfg.save_dir), self.cfg.encoder)
        return model

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the context encoder, for a checkpoint."""
        return {"context": self.context_settings}

    def has_sharded_data(self, split: str) -> bool:
        """Return False: several folders are mixed, so every epoch reads all of them."""
        return False

    def open_folders(self, split: str, kind: Any) -> Iterator[Any]:
        """Open and check the part `split` of each folder with `kind`; for validation, folders without one are skipped."""
        folders = [Path(folder) / split for folder in split_paths(self.cfg.data)]
        if split != "train" and any(folder.is_dir() for folder in folders):
            folders = [folder for folder in folders if folder.is_dir()]
        for folder in folders:
            opened = kind(folder)
            opened.check()
            yield opened


def save_tokenizer(tokenizer: SubwordTokenizer, folder: Path, origin: str) -> None:
    """Write a tokenizer, which comes from `origin`, to the folder of the checkpoints, unless they already have it.

    Raises:
        ConfigurationError: they have another.
    """
    if any(folder.glob("*.pt")) and any((folder / filename).is_file() for filename in ENCODER_TOKENIZERS):
        saved = load_tokenizer(folder)
        if (saved.filename, saved.content, saved.symbols) != (
            tokenizer.filename,
            tokenizer.content,
            tokenizer.symbols,
        ):
            raise ConfigurationError(
                f"--save-dir {folder} holds checkpoints with another tokenizer than that of {origin}: "
                "give the encoder they were trained from, or another --save-dir"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
