"""OmegaT's script, run by Groovy with OmegaT's own classes, where they are installed: Debian's omegat and groovy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import ROOT
from tests.server.conftest import Served
from tests.small_models import World

SHARE = Path(os.environ.get("OMEGAT_SHARE", "/usr/share"))
JARS = [SHARE / "omegat/OmegaT.jar", SHARE / "groovy/embeddable/groovy-all-2.4.21.jar"]
# Enters three segments in turn, leaves the first two with translations, and the second once more without a change.
DRIVER = """
import org.omegat.core.*
import org.omegat.core.data.*
import groovy.json.JsonSlurper

def (script, pairs) = [new File(args[0]), new JsonSlurper().parse(new File(args[1]), "UTF-8")]
def entries = pairs.collect { new SourceTextEntry(new EntryKey("a", it[0], null, null, null, null), 1, null, null, []) }
def known = [:]
Core.@currentProject = [getTranslationInfo: { entry ->
    new TMXEntry(new PrepareTMXEntry(source: entry.srcText, translation: known[entry.srcText]), true, null)
}] as IProject
def enter = { entry ->
    CoreEvents.fireEntryActivated(entry)
    javax.swing.SwingUtilities.invokeAndWait { }
}
new GroovyShell(this.class.classLoader).evaluate(script)
enter(entries[0])
known[entries[0].srcText] = pairs[0][1]
enter(entries[1])
known[entries[1].srcText] = pairs[1][1]
[entries[2], entries[1], entries[0], null].each(enter)
sleep(args[2] as int)
"""


@pytest.mark.full
@pytest.mark.skipif(not (shutil.which("java") and all(map(Path.is_file, JARS))), reason="there is no OmegaT")
def test_confirmed_segments_are_learned(server: Served, world: World, tmp_path: Path) -> None:
    pairs, given = (
        [*read_pairs(world.folder / "test.tsv")][:3],
        ("driver.groovy", "learn.groovy", "pairs.json"),
    )
    script = (ROOT / "examples/omegat_learn.groovy").read_text(encoding="utf-8")
    for name, text in zip(
        given, (DRIVER, script.replace("http://127.0.0.1:5000", server.url), json.dumps(pairs))
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
    jars = ":".join(map(str, [*JARS, SHARE / "java/*"]))
    java = [
        "java",
        "-Djava.awt.headless=true",
        f"-Duser.home={tmp_path}",
        "-cp",
        jars,
        "groovy.ui.GroovyMain",
    ]
    done = subprocess.run([*java, *given, "5000"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    learned = [(one.source, one.target, one.count) for one in server.translator.memory()]
    assert learned == [(*pairs[1], 1), (*pairs[0], 1)], done.stderr
