"""Under which names batches and data sets hold their labels."""

# of mappings, in the order in which they are looked for
LABEL_KEYS = ("labels", "label", "target", "targets", "y")
