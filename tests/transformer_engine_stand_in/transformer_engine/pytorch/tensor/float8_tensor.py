from . import QuantizedTensor


class Float8Tensor(QuantizedTensor): ...
