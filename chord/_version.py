"""The version of the code. A manifest must carry the same one; a local suffix (+cu130) makes no difference."""

__version__ = "0.1.0"


def same_version(one: str, other: str) -> bool:
    """A local suffix (+cu130) says how something was built, not what it is."""
    return one.partition("+")[0] == other.partition("+")[0]
