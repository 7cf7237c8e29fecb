"""Damaged checkpoints."""


def flip(path, place=0.5, bit=2):
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
