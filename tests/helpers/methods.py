"""Lists of methods with different payloads, memories and random draws, for properties of all methods."""

from fl_lightning.methods import (
    MOON,
    SCAFFOLD,
    FedBN,
    FedCKA,
    FedDecorr,
    FedDyn,
    FedNova,
    FedNTD,
    FedPer,
    FedProto,
    FedRoD,
    FedSAM,
    LGFedAvg,
    Local,
    LogitAdjustment,
)

METHODS = {
    "FedAvg": list,
    "SCAFFOLD": lambda: [SCAFFOLD()],
    "MOON": lambda: [MOON()],
    "FedDyn": lambda: [FedDyn(reported="all")],
    "FedProto": lambda: [FedProto()],
    "FedNova with FedDecorr": lambda: [FedNova(), FedDecorr()],
    "FedNTD": lambda: [FedNTD()],
    "FedSAM": lambda: [FedSAM()],
    "FedBN": lambda: [FedBN()],
    "FedPer": lambda: [FedPer(2)],
    "LGFedAvg": lambda: [LGFedAvg()],
    "LogitAdjustment": lambda: [LogitAdjustment(prior="global")],
    "LogitAdjustment post hoc": lambda: [LogitAdjustment(when="post_hoc")],
    "FedRoD": lambda: [FedRoD()],
    "Local": lambda: [Local()],
    "FedCKA": lambda: [FedCKA(layers=1)],
}
