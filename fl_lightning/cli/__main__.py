"""``python -m fl_lightning.cli`` is the program ``fl-lightning``."""

from fl_lightning.cli import main

main()
