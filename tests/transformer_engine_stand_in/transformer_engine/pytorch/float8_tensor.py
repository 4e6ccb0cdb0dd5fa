from .tensor.float8_tensor import Float8Tensor as Float8Tensor
