"""Networks, and the house LightningModule around them."""

from fl_lightning.models.backbone import Backbone
from fl_lightning.models.classifier import ImageClassifier
from fl_lightning.models.encoders import MLP, MOONCNN, Encoder, FedCKACNN, FedDynCNN, FedUVCNN, Logistic
from fl_lightning.models.mobilenet import MobileNetV2
from fl_lightning.models.projector import Head, ProjectionHead, Projector
from fl_lightning.models.resnet import ResNet18, ResNet20, ResNet32, ResNet50

__all__ = [
    "MLP",
    "MOONCNN",
    "Backbone",
    "Encoder",
    "FedCKACNN",
    "FedDynCNN",
    "FedUVCNN",
    "Head",
    "ImageClassifier",
    "Logistic",
    "MobileNetV2",
    "ProjectionHead",
    "Projector",
    "ResNet18",
    "ResNet20",
    "ResNet32",
    "ResNet50",
]
