import torch


class FusibleOperation(torch.nn.Module): ...


class Sequential(torch.nn.Sequential): ...
