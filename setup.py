"""The package's description on an index: README without the links and pictures that only a checkout
has."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
PICTURES, LINKS = r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", r"\[([^\]]*)\]\((?!https?:)[^)]*\)"
TEXT = re.sub(LINKS, r"\1", re.sub(PICTURES, "", README))

setup(long_description=TEXT, long_description_content_type="text/markdown")
