"""Shards: a datastore built as N smaller ones, by as many commands, of neighbouring chunks of sentences each."""

from __future__ import annotations

from typing import Any

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.settings import option


def num_shards_option() -> Any:
    """Return the field `num_shards` of a build's settings."""
    return option(
        1, "build one of N shards, each a datastore, by as many commands on any machines; fairseq-ccpr merge joins them",
        within="[1, inf)", needs="at least 1 shard", metavar="N",
    )  # fmt: skip


def shard_id_option() -> Any:
    """Return the field `shard_id` of a build's settings."""
    return option(0, "which of them, from 0", metavar="I")


def check_shard(num_shards: int, shard_id: int, index: str) -> None:
    """Check that a shard exists, and is to have no index of its own.

    Raises:
        ConfigurationError: names the option.
    """
    if not 0 <= shard_id < num_shards:
        raise ConfigurationError(
            f"--shard-id is {shard_id}, and --num-shards {num_shards}: give a number from 0 to {num_shards - 1}"
        )
    if num_shards > 1 and index not in ("auto", "exact"):
        raise ConfigurationError(
            f"--index {index}: a shard has no index; leave it out, and give it to fairseq-ccpr merge"
        )


def describe_shard(num_shards: int, shard_id: int, length: int) -> list[int] | None:
    """Tell what a manifest says of a shard: its number, of how many, and the length of chunks; None for a whole datastore.

    Shards can be merged if they agree on all but the first.
    """
    return [shard_id, num_shards, length] if num_shards > 1 else None


def chunks_of_shard(total: int, num_shards: int, shard_id: int, unit: str) -> range:
    """Choose the chunks of a shard among `total`: neighbours, so that shards are joined by appending.

    Args:
        unit: what the length of a chunk is given in, `sentences` or `tokens`.

    Raises:
        ConfigurationError: there are fewer chunks than shards.

    >>> [list(chunks_of_shard(5, 2, shard, "sentences")) for shard in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    if total < num_shards:
        raise ConfigurationError(
            f"--num-shards is {num_shards}, but --chunk-{unit} cuts the text into {total}: give up to {total} shards, or "
            "shorter chunks"
        )
    return range(total * shard_id // num_shards, total * (shard_id + 1) // num_shards)
