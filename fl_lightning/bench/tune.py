"""Tunes the methods of a suite on a validation split, each in a study of its own."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from fl_lightning.bench.driver import POLL, Driver, Dropped, Failed
from fl_lightning.bench.estimate import measured
from fl_lightning.bench.process import Interrupt, Runner
from fl_lightning.bench.study import (
    CellStorage,
    QueueEmpty,
    decisive,
    digest_of,
    fail_dead,
    hidden,
    is_running,
    repeats,
    running,
)
from fl_lightning.bench.suite import Cell, plain
from fl_lightning.bench.tuning import Search, Space, Tuning
from fl_lightning.errors import UsageError, require
