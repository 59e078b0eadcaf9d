"""The version of the code. A manifest must carry the same one; a local suffix (+cu130) makes no difference."""

__version__ = "0.1.0"
