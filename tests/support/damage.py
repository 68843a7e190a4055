"""Damages the content of a file at random."""

TOKENS = (b"0", b"-1", b"1e999", b"9" * 30, b"null", b"[]", b"{}", b'""', b"[" * 5000, b"\xff\x00")


def mutated(rng, content):
    """The content, damaged in one place: bits, spans, numbers, length."""
    start, stop = sorted(rng.integers(len(content) + 1, size=2))
    few = int(min(start + rng.integers(1, 9), len(content)))
    token = TOKENS[rng.integers(len(TOKENS))]
    digits = [i for i, byte in enumerate(content) if 48 <= byte < 58]
    at = digits[rng.integers(len(digits))] if digits else 0
    flipped = bytearray(content)
    bit = rng.integers(8 * len(content))
    flipped[bit // 8] ^= 1 << bit % 8
    return [
        bytes(flipped),
        content[:start],
        content[:start] + content[stop:],
        content[:start] + rng.bytes(few - start) + content[few:],
        content[:start] + bytes(stop - start) + content[stop:],
        content[:start] + b"\xff" * 8 + content[start + 8 :],
        content[:stop] + content[start:stop] + content[stop:],
        content[:start] + token + content[start:],
        content[:at] + token + content[at + 1 :],
        content[:at] + b"%d" % rng.integers(10) + content[at + 1 :],
        rng.bytes(few),
    ][rng.integers(11)]
