"""Lists of methods with different payloads, memories and random draws, for properties of all methods."""

from fl_lightning import methods

ALONE = "SCAFFOLD MOON FedProto FedDisco FedNTD FedSAM FedAS FedBN LGFedAvg FedRoD Ditto Local"
METHODS = {
    "FedAvg": list,
    **{name: lambda name=name: [getattr(methods, name)()] for name in ALONE.split()},
    "FedDyn": lambda: [methods.FedDyn(reported="all")],
    "FedNova with FedDecorr": lambda: [methods.FedNova(), methods.FedDecorr()],
    "PerFedAvg": lambda: [methods.PerFedAvg(hessian=True)],
    "FedALA": lambda: [methods.FedALA(window=2)],
    "FedPer": lambda: [methods.FedPer(2)],
    "LogitAdjustment": lambda: [methods.LogitAdjustment(prior="global")],
    "LogitAdjustment post hoc": lambda: [methods.LogitAdjustment(when="post_hoc")],
    "APFL": lambda: [methods.APFL(adaptive=True)],
    "PFedMe": lambda: [methods.PFedMe(inner_steps=2)],
    "FedCKA": lambda: [methods.FedCKA(layers=1)],
}
