"""The files of a run: its folder, metrics and plan."""
