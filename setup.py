"""What pyproject.toml cannot say: where the repository is, by the variable REPOSITORY when a release is
built.
"""

import os
import re
from pathlib import Path

from setuptools import setup

repository = os.environ.get("REPOSITORY", "")
readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
if repository:  # a package page has none of the files that the README shows and names
    readme = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{repository}/raw/HEAD/", readme)
    readme = re.sub(r"(?<!!)(\[[^]]*\]\()(?!https?:|#)", rf"\1{repository}/blob/HEAD/", readme)

setup(
    long_description=readme,
    long_description_content_type="text/markdown",
    project_urls={"Repository": repository} if repository else {},
)
