"""Search the datastore in a way of your own. From the repository: python examples/retriever.py"""

import torch

from fairseq_ccpr import (
    Neighbours,
    TokenDatastore,
    TranslationRetrievalConfig,
    TranslationRetrievalTask,
    Translator,
)
from fairseq.tasks import register_task  # after fairseq_ccpr, as fairseq alone would print what it loads


class Cosine:
    """Searches exactly, by the cosine of keys where the datastore has distances."""

    def __init__(self, datastore: TokenDatastore, device: torch.device) -> None:
        self.datastore = datastore
        keys = torch.tensor(datastore.keys).float().to(device)
        self.keys, self.values = (
            torch.nn.functional.normalize(keys),
            torch.tensor(datastore.values).long().to(device),
        )

    def search(self, queries: torch.Tensor, k: int) -> Neighbours:
        """Search with decoder states [N, d]; entries, scores and tokens are [N, k], the nearest first."""
        scores, entries = (torch.nn.functional.normalize(queries.float()) @ self.keys.T).topk(k)
        return Neighbours(entries, scores, self.values[entries])

    def describe(self) -> dict[str, object]:
        """Tell the signature what this is."""
        return {"retriever": "Cosine"}


@register_task("translation_cosine", dataclass=TranslationRetrievalConfig)
class CosineTask(TranslationRetrievalTask):
    """Retrieves with it."""

    retriever_class = Cosine


with Translator(
    "datastores/demo/model.pt",
    datastore="datastores/demo/ready",
    task="translation_cosine",
    tokens_temperature=0.1,
) as translator:
    for translation in translator.translate(["Und es traten Pharisäer herzu und fragten ihn."]):
        print(translation.text)
    print(translator.signature)
