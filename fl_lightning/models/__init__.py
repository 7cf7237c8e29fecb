"""Networks, and the house LightningModule around them."""

from fl_lightning.models.classifier import ImageClassifier
from fl_lightning.models.encoders import MLP, Encoder, FedCKACNN, FedUVCNN
from fl_lightning.models.projector import Projector
from fl_lightning.models.resnet import ResNet18, ResNet50

__all__ = ["MLP", "Encoder", "FedCKACNN", "FedUVCNN", "ImageClassifier", "Projector", "ResNet18", "ResNet50"]
