"""The classes are in the package `lineartime`."""

try:  # or transformers would say to install it from an index, where it is not
    from lineartime.hf import *  # noqa: F403
except ImportError as e:
    raise ImportError(f"{e}: install lineartime from its repository or a wheel, see its README") from e
