"""Train, validate and test: ``python cli.py fit --config FILE``."""

from fl_lightning.cli import main

main()
