import torch

_dummies = {}


def get_workspace(): ...


def get_dummy_wgrad(shape, dtype, zero=False):
    """One for all parameters of a shape, as autograd wants a gradient of it."""
    key = (tuple(shape), dtype)
    if key not in _dummies:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _dummies[key] = torch.empty(shape, dtype=dtype, device=device, requires_grad=False)
    if zero:
        _dummies[key].fill_(0)
    return _dummies[key].detach()


class TransformerEngineBaseModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False, "recipe": None}
        self.fp8 = self.fp8_calibration = False
        self.tp_group, self.tp_size = None, 1

    def set_tensor_parallel_group(self, tp_group):
        self.tp_group, self.tp_group_initialized = tp_group, True

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)  # without FP8

    def set_extra_state(self, state): ...

    def init_fp8_metadata(self, num_gemms=1): ...

    def backward_dw(self): ...
