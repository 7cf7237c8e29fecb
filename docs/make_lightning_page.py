"""Make docs/coming_from_lightning.md, the page of what replaces the parts of Lightning's Trainer.

python docs/make_lightning_page.py [--output FOLDER]
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from lightning.pytorch import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fl_lightning import FederatedTrainer  # the line above makes it importable
from fl_lightning.utilities.lightning_replacements import ARGUMENTS, ATTRIBUTES, CALLBACKS, OTHER_CALLBACKS, OTHER_KEYS

DOCS = Path(__file__).resolve().parent
PAGE = """\
# Coming from Lightning's Trainer

A LightningModule works unchanged, and `Partitioned` assigns the training examples of a data module to clients:

```diff
- trainer = Trainer(max_epochs=10, gradient_clip_val=1.0)
- trainer.fit(model, datamodule)
+ trainer = FederatedTrainer(max_rounds=10, gradient_clip_val=1.0)
+ trainer.fit(model, Partitioned(datamodule, num_clients=10))
```

From data sets, make a data module with `LightningDataModule.from_datasets(train, val, test, batch_size=32)`; by default
it has batches of one example.

If a name of Lightning's `Trainer` does not exist here, the error says what replaces it. These tables list all of them.

## Arguments

These have the same names and meaning as in Lightning; [`FederatedTrainer`](api/core.md) describes them:
{same}.

`trainer.NAME` is the key in a config or on the command line; in Python it is the argument `NAME`.

{arguments}

## Other keys, and arguments of `fit` and `test`

{keys}

## Attributes

{attributes}

In a LightningModule, `self.trainer` has [Lightning's names](own_module_specification.md#self-trainer).

## Callbacks

Each row includes subclasses. For other callbacks, {others}.

{callbacks}
"""


def marked(text: str) -> str:
    """A text with names as code, and links to pages."""
    names = r"docs/(\w+\.md)|`[^`]*`|[\w./]*\w[_.]\w[\w./]*(?:\([\w ]*\))?(?:=\w+)?"

    def mark(found: re.Match[str]) -> str:
        return f"[this page]({found[1]})" if found[1] else found[0] if found[0][0] == "`" else f"`{found[0]}`"

    return re.sub(names, mark, text)


def table(texts: Mapping[str, str]) -> str:
    """A table of Lightning's names with what replaces them."""
    rows = [f"| `{name}` | {marked(text)} |" for name, text in texts.items()]
    return "\n".join(["| Lightning | here |", "|---|---|", *rows])


def page() -> str:
    """The whole page."""
    ours = inspect.signature(FederatedTrainer).parameters
    same = [f"`{name}`" for name in inspect.signature(Trainer).parameters if name in ours]
    return PAGE.format(
        same=fill(", ".join(same), 120),
        arguments=table(ARGUMENTS),
        keys=table(OTHER_KEYS),
        attributes=table(ATTRIBUTES),
        callbacks=table(CALLBACKS),
        others=marked(OTHER_CALLBACKS),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DOCS, help="folder of the page; default: docs")
    (parser.parse_args().output / "coming_from_lightning.md").write_text(page(), "utf-8")
