import torch


class QuantizedTensor(torch.Tensor): ...


from . import float8_tensor, mxfp8_tensor, utils  # noqa: E402
