"""Flower's ServerApp: ``fit`` of a config whose clients are sites."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from fl_lightning.cli.entry_point import main as run_command
from fl_lightning.training.patching import patched


def server_app(config: Path) -> Any:
    """The ``ServerApp`` of a config that ``federate`` has written."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        # imports torch when the run begins, not when Flower inspects the app
        from fl_lightning.federation import server

        command, run_config = ["fit", "--config", str(config)], context.run_config
        if run_config.get("root"):
            command += ["--trainer.default_root_dir", run_config["root"]]
        if run_config.get("ckpt-path"):
            command += ["--ckpt_path", run_config["ckpt-path"]]
        # the command line of Flower's process holds a token, and does not concern this program
        with patched(sys, argv=[*sys.argv[:1], *command]), patched(server, link=server.FlowerLink(grid)):
            try:
                run_command()
            except SystemExit as error:
                if error.code:
                    logging.getLogger("flwr").addFilter(tells_more)
                    # Flower counts it as a failure of the run only where it is an error
                    raise RuntimeError(f"the run ended with status {error.code}; its log says why") from None

    return app


def tells_more(record: logging.LogRecord) -> bool:
    """Whether a line of Flower's log tells more than that the run has failed: the last line shall say what to mend."""
    return record.exc_info is None and not str(record.msg).startswith("Exit Code")
