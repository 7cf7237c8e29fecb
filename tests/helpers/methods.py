"""Lists of methods with different payloads, memories and random draws, for properties of all methods."""

from fl_lightning.methods import (
    APFL,
    MOON,
    SCAFFOLD,
    Ditto,
    FedBN,
    FedCKA,
    FedDecorr,
    FedDyn,
    FedNova,
    FedPer,
    FedProto,
    FedRoD,
    LGFedAvg,
    Local,
    PFedMe,
)

METHODS = {
    "FedAvg": list,
    "SCAFFOLD": lambda: [SCAFFOLD()],
    "MOON": lambda: [MOON()],
    "FedDyn": lambda: [FedDyn(reported="all")],
    "FedProto": lambda: [FedProto()],
    "FedNova with FedDecorr": lambda: [FedNova(), FedDecorr()],
    "FedBN": lambda: [FedBN()],
    "FedPer": lambda: [FedPer(2)],
    "LGFedAvg": lambda: [LGFedAvg()],
    "FedRoD": lambda: [FedRoD()],
    "Ditto": lambda: [Ditto()],
    "APFL": lambda: [APFL(adaptive=True)],
    "PFedMe": lambda: [PFedMe(inner_steps=2)],
    "Local": lambda: [Local()],
    "FedCKA": lambda: [FedCKA(layers=1)],
}
