"""What the callbacks of this package show of their files.

The declarations stand here, apart from the callbacks that hold them as ``pictures``, because a report draws them
without importing torch.
"""

from __future__ import annotations

from fl_lightning.pictures.declared import (
    Measured,
    Panel,
    Picture,
    Shown,
    descending,
    diagonal,
    off_diagonal,
    over,
    row_shares,
)

CLASS_GROUPS = ("majority", "minority", "missing")
BY_CLIENT = "client, the largest value first"
SPECTRUM_TITLES = {"classifier": "classifier weight", "representation": "covariance of the test representations"}

SPECTRA = Measured(
    "spectra.npz",
    "Spectra",
    (
        *(
            Picture(
                f"spectrum/{what}",
                "",
                (Panel("spectrum", (Shown(what, ""),), title=title, rounds="all", lines=(None, "threshold")),),
            )
            for what, title in SPECTRUM_TITLES.items()
        ),
        *(
            Picture(
                f"spectrum/local_{what}",
                "local models",
                (
                    Panel(
                        "spectrum",
                        (
                            Shown(f"local_{what}", "mean of the local models", over(0), spread=0),
                            Shown(f"global_{what}", "global model"),
                        ),
                        title=title,
                        lines=(None, "threshold"),
                    ),
                ),
            )
            for what, title in SPECTRUM_TITLES.items()
        ),
    ),
)
SIMILARITY = Measured(
    "layer_similarity.npz",
    "Similarity layer by layer",
    (
        Picture(
            "similarity/layers",
            "layer similarity of local models and the global one",
            (
                Panel(
                    "curves",
                    (
                        Shown("to_global", "clients with the global model", over(1), spread=1),
                        Shown("between_clients", "clients with each other", off_diagonal),
                        Shown("between_rounds", "global model before and after the round"),
                    ),
                    axis="layer",
                    names=("layers",),
                    values="CKA",
                ),
            ),
        ),
        Picture(
            "similarity/global",
            "CKA with the global model",
            (
                Panel(
                    "map",
                    (Shown("to_global", "CKA"),),
                    axis="layer, client",
                    names=("layers", "clients"),
                    limits=(0, 1),
                ),
            ),
            compared=False,
        ),
        Picture(
            "similarity/clients",
            "CKA of local models",
            (
                Panel(
                    "map",
                    (Shown("between_clients", "CKA"),),
                    axis="client, client",
                    names=("clients", "clients"),
                    limits=(0, 1),
                    each="layer_titles",
                ),
            ),
            compared=False,
        ),
    ),
)
ALIGNMENT = Measured(
    "layer_alignment.npz",
    "Alignment of consecutive layers",
    (
        *(
            Picture(
                f"alignment/{what}",
                f"alignment of consecutive layers, {models}",
                (
                    Panel(
                        "map",
                        (Shown(what, "absolute cosine"),),
                        axis="right singular vector of the second, left singular vector of the first",
                        limits=(0, 1),
                        each=f"{what}_titles",
                    ),
                ),
                compared=False,
            )
            for what, models in (("global", "global model"), ("local", "mean over the local models"))
        ),
        Picture(
            "",
            "alignment of consecutive layers",
            (
                Panel(
                    "curves",
                    (
                        Shown("global", "alignment, global model", diagonal),
                        Shown("local", "alignment, local models", diagonal),
                    ),
                    axis="pair of layers",
                    names=("pairs",),
                ),
            ),
        ),
    ),
)
DRIFT = Measured(
    "drift.npz",
    "Drift in detail",
    (
        Picture(
            "drift/pairwise",
            "cosines of the clients' changes",
            (
                Panel(
                    "map",
                    (Shown("pairwise", "cosine of two clients' changes"),),
                    axis="client, client",
                    names=("clients", "clients"),
                    limits=(-1, 1),
                ),
            ),
        ),
        Picture(
            "drift/layers",
            "drift by layer",
            tuple(
                Panel("curves", (shown,), axis="layer", names=("layers",), rounds="some", log=log)
                for shown, log in (
                    (Shown("layer_to_mean", "cosine to the mean change", over(1)), ""),
                    (Shown("layer_dissimilarity", "gradient dissimilarity B²"), "y"),
                    (Shown("layer_norms", "norm of a client's change", over(1)), ""),
                )
            ),
        ),
        Picture(
            "drift/classifier",
            "local classifiers and label counts",
            tuple(
                Panel(
                    "points",
                    (Shown(f"{what}_by_share", label),),
                    axis="share of the class in the client's data in %",
                    note=f"{what}_note",
                )
                for what, label in (("row_norm", "norm of the class's row"), ("bias", "bias of the class"))
            ),
            compared=False,
        ),
        Picture(
            "",
            "drift of the clients",
            (
                Panel("course", (Shown("dissimilarity", "gradient dissimilarity"),)),
                Panel(
                    "curves",
                    (
                        Shown("norms", "norm of the change", descending),
                        Shown("to_mean", "cosine to the mean change", descending),
                    ),
                    axis=BY_CLIENT,
                ),
            ),
        ),
    ),
)
WHEN = {"before": "before aggregation", "after": "after aggregation"}
PER_CLASS = Measured(
    "per_class.npz",
    "Accuracy by class",
    (
        Picture(
            "per_class/aggregation",
            "accuracy before and after aggregation, mean over the clients",
            (
                Panel(
                    "bars",
                    tuple(Shown(when, label, over(0)) for when, label in WHEN.items()),
                    axis="class",
                    values="test accuracy",
                    percent=True,
                ),
                Panel(
                    "bars",
                    tuple(Shown(f"groups_{when}", label, over(0)) for when, label in WHEN.items()),
                    axis="group",
                    places=CLASS_GROUPS,
                    values="test accuracy",
                    percent=True,
                ),
            ),
        ),
        Picture(
            "per_class/confusion",
            "how each class's test examples are classified",
            (
                Panel(
                    "map",
                    tuple(Shown(f"confusion_{when}", label, row_shares) for when, label in WHEN.items()),
                    axis="class, classified as",
                    values="share of the class",
                    percent=True,
                    limits=(0, 100),
                ),
            ),
        ),
        Picture(
            "per_class/clients",
            "accuracy of each class",
            (
                Panel(
                    "bars",
                    (Shown("label_counts", "training examples"),),
                    axis="class",
                    each="client_titles",
                    most=4,
                    beside=Panel(
                        "curves",
                        (Shown("before", "accuracy of the local model"), Shown("after", "accuracy after aggregation")),
                        axis="class",
                        values="test accuracy",
                        percent=True,
                        limits=(-4, 104),
                    ),
                ),
            ),
            compared=False,
        ),
    ),
)
MODELS = {"own": "as it is", "tuned": "fine-tuned", "prototype": "nearest prototype"}
PERSONAL = Measured(
    "personal.npz",
    "Accuracy by client",
    (
        Picture(
            "personal/clients",
            "personal accuracy",
            (
                Panel(
                    "curves",
                    tuple(Shown(f"{what}_ordered", label) for what, label in MODELS.items()),
                    axis="client, from the worst to the best",
                    names=("clients_ordered",),
                    values="accuracy on its own test data",
                    percent=True,
                    note="means",
                ),
            ),
            compared=False,
        ),
        Picture(
            "",
            "accuracy by client",
            (
                Panel(
                    "curves",
                    tuple(Shown(what, label, descending) for what, label in MODELS.items()),
                    axis=BY_CLIENT,
                    values="own test data",
                    percent=True,
                ),
                Panel("bars", (Shown("domain", "global model"),), axis="domain", names=("domains",), percent=True),
            ),
        ),
    ),
)
BOUNDS = {"ratio": "standard softmax (Definition 3)", "ratio_calibrated": "calibrated softmax (Theorem 3)"}
DEVIATION = Measured(
    "deviation.npz",
    "Deviation bound",
    (
        Picture(
            "deviation/signs",
            "direction of each minority class's row by the ratio of Theorem 1",
            tuple(
                Panel(
                    "points",
                    (Shown(f"{ratio}_signs", "cosine of the row's change and the class's mean"),),
                    axis="(n_j / n_r) / D_jr",
                    title=title,
                    log="x",
                    kinds=f"{ratio}_kinds",
                    lines=(1, 0),
                    note=f"{ratio}_note",
                )
                for ratio, title in BOUNDS.items()
            ),
            compared=False,
        ),
        Picture(
            "",
            "deviation by class",
            (
                Panel(
                    "curves",
                    tuple(
                        Shown(array, label, over(0))
                        for array, label in (
                            ("ratio", "ratio to the bound"),
                            ("ratio_calibrated", "ratio to the calibrated bound"),
                            ("own", "cosine of the own row"),
                            ("others", "largest cosine of another row"),
                        )
                    ),
                    axis="class",
                ),
            ),
        ),
    ),
)
EMBEDDING = Measured(
    "embedding.npz",
    "Embedding of the representations",
    (
        Picture(
            "embedding/classes",
            "t-SNE of the representations by class, each model alone",
            (Panel("points", (Shown("apart", ""),), axis="", kinds="classes", each="models"),),
            compared=False,
        ),
        Picture(
            "embedding/clients",
            "t-SNE of all models' representations",
            (Panel("points", (Shown("together", ""),), axis="", kinds="of_model"),),
            compared=False,
        ),
        Picture(
            "",
            "t-SNE of the test representations",
            (Panel("points", (Shown("global", "t-SNE of the test representations"),), axis="", kinds="labels"),),
        ),
    ),
)
SHIPPED = {
    declared.file: declared
    for declared in (SPECTRA, SIMILARITY, ALIGNMENT, DRIFT, PER_CLASS, PERSONAL, DEVIATION, EMBEDDING)
}
