"""Training of students: phrase encoders of fewer layers, by a task, a criterion and an architecture of fairseq.

Importing this package registers them: for fairseq-train, it is the `--user-dir`, which fairseq imports as `student`. A
student that was trained is a `PhraseEncoder`, and used without this.
"""

from fairseq_ccpr.lab.student import training

__all__ = ["training"]
