"""The published methods, one file each."""

# rules for clients that may lie, and attacks that test them, are excluded from comparisons of methods
from fl_lightning.methods.alie import ALIE as ALIE
from fl_lightning.methods.apfl import APFL
from fl_lightning.methods.centered_clipping import CenteredClipping as CenteredClipping
from fl_lightning.methods.coordinate_median import CoordinateMedian as CoordinateMedian
from fl_lightning.methods.decov import DeCov
from fl_lightning.methods.ditto import Ditto

# excluded from comparisons of methods, since its cost in accuracy depends on its noise
from fl_lightning.methods.dpfedavg import DPFedAvg as DPFedAvg
from fl_lightning.methods.fedala import FedALA
from fl_lightning.methods.fedamp import FedAMP
from fl_lightning.methods.fedas import FedAS
from fl_lightning.methods.fedasam import FedASAM

# FedAsync and FedBuff are excluded, since a step of an asynchronous server is no round
from fl_lightning.methods.fedasync import FedAsync as FedAsync
from fl_lightning.methods.fedbabu import FedBABU
from fl_lightning.methods.fedbn import FedBN
from fl_lightning.methods.fedbuff import FedBuff as FedBuff
from fl_lightning.methods.fedcka import FedCKA
from fl_lightning.methods.feddecorr import FedDecorr
from fl_lightning.methods.feddisco import FedDisco
from fl_lightning.methods.feddyn import FedDyn

# FedIT and the other methods for LoRA are excluded, too, since they need a model with adapters
from fl_lightning.methods.fedexlora import FedExLoRA as FedExLoRA
from fl_lightning.methods.fedexp import FedExP
from fl_lightning.methods.fedit import FedIT as FedIT
from fl_lightning.methods.fedlc import FedLC
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedntd import FedNTD
from fl_lightning.methods.fedper import FedPer
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.fedrod import FedRoD
from fl_lightning.methods.fedrs import FedRS
from fl_lightning.methods.fedsam import FedSAM
from fl_lightning.methods.feduv import FedUV
from fl_lightning.methods.fedvls import FedVLS
from fl_lightning.methods.ffalora import FFALoRA as FFALoRA
from fl_lightning.methods.fixbn import FixBN
from fl_lightning.methods.freeze import Freeze
from fl_lightning.methods.gaussian import Gaussian as Gaussian
from fl_lightning.methods.geometric_median import GeometricMedian as GeometricMedian
from fl_lightning.methods.hetlora import HetLoRA as HetLoRA
from fl_lightning.methods.ifca import IFCA
from fl_lightning.methods.ipm import IPM as IPM
from fl_lightning.methods.label_flip import LabelFlip as LabelFlip
from fl_lightning.methods.lgfedavg import LGFedAvg
from fl_lightning.methods.local import Local
from fl_lightning.methods.logit_adjustment import LogitAdjustment
from fl_lightning.methods.lora_product import LoRAProduct as LoRAProduct
from fl_lightning.methods.moon import MOON
from fl_lightning.methods.multi_krum import MultiKrum as MultiKrum
from fl_lightning.methods.nnm import NNM as NNM
from fl_lightning.methods.perfedavg import PerFedAvg
from fl_lightning.methods.pfedme import PFedMe
from fl_lightning.methods.scaffold import SCAFFOLD
from fl_lightning.methods.sign_flip import SignFlip as SignFlip
from fl_lightning.methods.structured_decov import StructuredDeCov
from fl_lightning.methods.trimmed_mean import TrimmedMean as TrimmedMean

__all__ = [
    "APFL",
    "IFCA",
    "MOON",
    "SCAFFOLD",
    "DeCov",
    "Ditto",
    "FedALA",
    "FedAMP",
    "FedAS",
    "FedASAM",
    "FedBABU",
    "FedBN",
    "FedCKA",
    "FedDecorr",
    "FedDisco",
    "FedDyn",
    "FedExP",
    "FedLC",
    "FedNTD",
    "FedNova",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRS",
    "FedRep",
    "FedRoD",
    "FedSAM",
    "FedUV",
    "FedVLS",
    "FixBN",
    "Freeze",
    "LGFedAvg",
    "Local",
    "LogitAdjustment",
    "PFedMe",
    "PerFedAvg",
    "StructuredDeCov",
]
