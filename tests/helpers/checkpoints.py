"""Checkpoints as a former version wrote them, and damaged ones."""

import torch


def flip(path, place=0.5):
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 4
    path.write_bytes(content)


def make_older(trainer, change):
    """Rewrite the last checkpoint of a run as a former version wrote it, without a manifest; returns its path."""
    path = trainer.run_dir / "checkpoints" / "last.ckpt"
    contents = torch.load(path, weights_only=True)
    change(contents)
    del contents["format"]
    torch.save({**contents, "history": trainer.history}, path)
    for name in ("last.ckpt.json", "previous.ckpt", "previous.ckpt.json", "history.jsonl"):
        path.with_name(name).unlink(missing_ok=True)
    return path
