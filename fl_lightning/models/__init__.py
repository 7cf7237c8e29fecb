"""Networks, and the LightningModule that trains them."""

from fl_lightning.models.backbone import Backbone
from fl_lightning.models.classifier import ImageClassifier
from fl_lightning.models.encoders import MLP, MOONCNN, Encoder, FedCKACNN, FedDynCNN, FedUVCNN, Logistic
from fl_lightning.models.etf import ETFClassifier
from fl_lightning.models.group_norm import with_group_norm
from fl_lightning.models.lora import with_lora
from fl_lightning.models.mobilenet import MobileNetV2
from fl_lightning.models.projector import BaseProjector, ProjectionHead, Projector
from fl_lightning.models.resnet import ResNet18, ResNet20, ResNet32, ResNet50

__all__ = [
    "MLP",
    "MOONCNN",
    "Backbone",
    "BaseProjector",
    "ETFClassifier",
    "Encoder",
    "FedCKACNN",
    "FedDynCNN",
    "FedUVCNN",
    "ImageClassifier",
    "Logistic",
    "MobileNetV2",
    "ProjectionHead",
    "Projector",
    "ResNet18",
    "ResNet20",
    "ResNet32",
    "ResNet50",
    "with_group_norm",
    "with_lora",
]
