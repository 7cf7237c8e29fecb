"""Checkpoints without a run, and ways to damage them."""

import torch

from fl_lightning.records.checkpoint_folder import CheckpointFolder
from fl_lightning.records.files import write_stamped


def save(folder, round_, best=False):
    """Write the checkpoint of a round in which two clients trained, and one did that has trained before."""
    path = folder.path / "clients"
    path.mkdir(parents=True, exist_ok=True)
    names = {k: f"{k}-{round_}.pt" for k in (0, 1)}
    for k, name in names.items():
        KNOWN[name] = write_stamped({"m": {"k": k, "w": torch.full((20,), round_)}}, path / name)
    if round_ == 1:
        KNOWN["7-1.pt"] = write_stamped({"m": {"k": 7}}, path / "7-1.pt")
    names[7] = "7-1.pt"
    history = [{"round": r, "test/loss": 1 / (r + 1), "time/round": 0.5 * r} for r in range(round_)]
    state = {"state_dict": {"w": torch.full((50,), round_)}, "server": {}, "round": round_, "clients": names}
    folder.save(state, {name: KNOWN[name] for name in names.values()}, history, best)


KNOWN = {}


def checkpoints(tmp_path, rounds=3):
    """A folder with the checkpoints of some rounds."""
    folder = CheckpointFolder(tmp_path / "version_0" / "checkpoints")
    for round_ in range(1, rounds + 1):
        save(folder, round_)
    return folder


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
