"""The classes are in the package: pip install lineartime."""

from lineartime.hf import *  # noqa: F403
