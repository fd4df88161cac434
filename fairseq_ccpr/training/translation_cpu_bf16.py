"""`--task translation_cpu_bf16`: fairseq's translation task, trained in bf16 on a CPU."""

from __future__ import annotations

from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_ccpr.training.cpu_autocast import CpuAutocast


@register_task("translation_cpu_bf16", dataclass=TranslationConfig)
class TranslationCpuBf16Task(CpuAutocast, TranslationTask):
    """Translation; on a GPU the same as `translation`, with fairseq's own `--fp16` and `--bf16`."""
