"""Small data sets of images in the formats of their files."""

import json

import numpy as np
from PIL import Image

from fl_lightning.data import FEMNIST, HAM10000, PACS
from fl_lightning.data.array_datasets import cycled, patterns


def write_images(root, folders, labels):
    """Write generated images of 8 x 8 pixels into the folder of each."""
    for index, (folder, image) in enumerate(zip(folders, patterns(labels, 8, 3, len(labels)), strict=True)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / folder / f"{index:05}.jpg", quality=95)


def write_tiny_imagenet(root):
    """Write 200 training and 100 validation images, as published."""
    labels = cycled(200, 200)
    write_images(root / "train", [f"n{c:08}/images" for c in labels], labels)
    write_images(root / "val", ["images"] * 100, labels[:100])
    lines = [f"{i:05}.jpg\tn{c:08}\t0\t0\t62\t62" for i, c in enumerate(labels[:100])]
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")


def write_pacs(root):
    """Write five images of each class and domain."""
    labels = cycled(7, 35)
    for domain in PACS.domain_names:
        write_images(root / domain, [PACS.class_names[c] for c in labels], labels)


def write_ham10000(root):
    """Write six images of each class and source, and their table."""
    labels, sources = cycled(7, 168), np.arange(168) // 7 % 4
    write_images(root, ["HAM10000_images_part_1"] * 168, labels)
    lines = ["lesion_id,image_id,dx,dx_type,age,sex,localization,dataset"]
    for i, (c, d) in enumerate(zip(labels, sources, strict=True)):
        name, source = HAM10000.class_names[c], HAM10000.domain_names[d]
        lines.append(f"HAM_{i:07},{i:05},{name},histo,50,male,back,{source}")
    (root / "HAM10000_metadata.csv").write_text("\n".join(lines) + "\n")


def write_femnist(root):
    """Write twelve training and four test images of each of 20 writers, in two files for each split."""
    for split, number in (("train", 12), ("test", 4)):
        (root / split).mkdir()
        for part in range(2):
            users = {f"f{writer:04}_00": user(number, writer) for writer in range(10 * part, 10 * part + 10)}
            content = {"users": list(users), "num_samples": [number] * len(users), "user_data": users}
            (root / split / f"all_data_{part}.json").write_text(json.dumps(content))


def user(number, writer):
    """The images of a writer: white paper is 1, and ink is darker."""
    labels = (cycled(FEMNIST.num_classes, number) + 3 * writer) % FEMNIST.num_classes
    images = patterns(np.append(labels, 61), 28, 1, writer)[:-1]
    return {"x": (1 - images.reshape(number, -1) / 1275).round(3).tolist(), "y": labels.tolist()}
