"""Learn a correction, which counts from the next sentence on, and forget it. From the repository: python examples/learn.py"""

import shutil
import tempfile

from fairseq_ccpr import Translator

SENTENCE, CORRECT = "Der Hauptmann ging nach Kapernaum.", "The centurion went to Capernaum."

with tempfile.TemporaryDirectory() as folder:  # a copy of the demo's datastore, as learning writes to it
    shutil.copytree("datastores/demo/ready", folder, dirs_exist_ok=True)
    with Translator("datastores/demo/model.pt", datastore=folder) as translator:
        (before,) = translator.translate([SENTENCE])
        learned = translator.learn(SENTENCE, CORRECT)
        (after,) = translator.translate([SENTENCE])
        translator.forget(learned.id)
        (again,) = translator.translate([SENTENCE])
for when, translation in {"before": before, "learned": after, "forgotten": again}.items():
    print(f"{when:10} {translation.text}")
