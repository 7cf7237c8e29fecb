"""Files of checkpoints."""


def bytes_of(folder):
    """Return the contents of all files in a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(path, place=0.5, bit=2):
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
