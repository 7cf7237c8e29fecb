"""Lists of methods with different payloads, memories and random draws, for properties of all methods."""

from fl_lightning.methods import (
    MOON,
    SCAFFOLD,
    FedBN,
    FedCKA,
    FedDecorr,
    FedDisco,
    FedDyn,
    FedNova,
    FedNTD,
    FedProto,
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
    "FedDisco": lambda: [FedDisco()],
    "FedNTD": lambda: [FedNTD()],
    "FedBN": lambda: [FedBN()],
    "LogitAdjustment": lambda: [LogitAdjustment(prior="global")],
    "LogitAdjustment post hoc": lambda: [LogitAdjustment(when="post_hoc")],
    "Local": lambda: [Local()],
    "FedCKA": lambda: [FedCKA(layers=1)],
}
