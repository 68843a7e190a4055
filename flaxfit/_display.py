"""What flaxfit says to a person at a terminal."""

import sys


def say(text: str) -> None:
    """Prints one line about what the library does, to stderr.

    >>> say("no checkpoint found, starting fresh")
    """
    print(f"flaxfit: {text}", file=sys.stderr)
