import torch

from . import base as base
from .base import TransformerEngineBaseModule
from .products import GroupedProduct, Norm, NormedProduct, Product


def _mark_parallel(parameter, axis):
    """As Transformer Engine does for Megatron."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, axis, 1


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        save_original_input=False,
        name=None,
    ):
        super().__init__()
        assert parallel_mode in (None, "row", "column"), f"parallel_mode {parallel_mode} not supported"
        assert not (ub_overlap_ag or ub_overlap_rs or delay_wgrad_compute or parameters_split)
        self.tp_group, self.tp_size = tp_group, tp_group.size() if tp_group is not None else tp_size
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation, self.parallel_mode, self.ub_name = fuse_wgrad_accumulation, parallel_mode, ub_name
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self._make_weight(init_method, device, params_dtype)

    def _make_weight(self, init_method, device, dtype):
        weight = torch.empty(self.out_features, self.in_features, device=device, dtype=dtype)
        self.weight = torch.nn.Parameter(weight)
        if self.use_bias:
            self.bias = torch.nn.Parameter(torch.zeros(self.out_features, device=device, dtype=dtype))
        else:
            self.bias = torch.empty(0, device=device, dtype=dtype)
        if init_method is not None:
            with torch.no_grad():
                init_method(self.weight)
        if self.parallel_mode is not None:
            _mark_parallel(self.weight, 0 if self.parallel_mode == "column" else 1)
        if self.use_bias and self.parallel_mode == "column":
            _mark_parallel(self.bias, 0)
        if self.use_bias and self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        assert inp.shape[-1] == self.in_features, "GEMM not possible"
        # The bias of a row-parallel layer comes after the sum over ranks.
        fused = self.bias if self.apply_bias and self.parallel_mode != "row" else None
        out = Product.apply(inp, self.weight, fused, self, is_first_microbatch)
        if self.apply_bias and self.parallel_mode == "row":
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        init_method=None,
        bias=True,
        normalization="LayerNorm",
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        return_layernorm_output=False,
        return_layernorm_output_gathered=False,
        parameters_split=None,
        zero_centered_gamma=False,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_wgrad=False,
        ub_bulk_dgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        name=None,
    ):
        assert normalization == "RMSNorm" and parallel_mode == "column", "all that is stood in for"
        assert not zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output and return_layernorm_output_gathered
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        super().__init__(
            in_features,
            out_features,
            sequence_parallel,
            fuse_wgrad_accumulation,
            tp_group,
            tp_size,
            init_method=init_method,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            device=device,
            ub_name=ub_name,
        )

    def _make_weight(self, init_method, device, dtype):
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(self.in_features, device=device, dtype=dtype))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = None
        super()._make_weight(init_method, device, dtype)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        assert inp.shape[-1] == self.in_features, "GEMM not possible"
        bias = self.bias if self.apply_bias else None
        out = NormedProduct.apply(inp, self.layer_norm_weight, self.weight, bias, self, is_first_microbatch)
        if self.return_layernorm_output:
            return (out[0], self.bias, out[1]) if self.return_bias else out
        return (out, self.bias) if self.return_bias else out


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        **kwargs,
    ):
        super().__init__()
        assert not zero_centered_gamma
        size = hidden_size if normalized_shape is None else normalized_shape
        self.eps, self.sequence_parallel = eps, sequence_parallel
        device, dtype = kwargs.get("device", "cuda"), params_dtype or kwargs.get("dtype")
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state): ...

    def forward(self, inp):
        return Norm.apply(inp, self.weight, self.eps)


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        device="cuda",
        ub_overlap_rs=False,
        ub_overlap_ag=False,
        ub_name=None,
        delay_wgrad_compute=False,
        save_original_input=False,
    ):
        super().__init__()
        assert not bias and not (ub_overlap_ag or ub_overlap_rs or delay_wgrad_compute)
        assert rng_tracker_name is None or get_rng_state_tracker is None or isinstance(rng_tracker_name, str)
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.fuse_wgrad_accumulation, self.parallel_mode = fuse_wgrad_accumulation, parallel_mode
        self.tp_group, self.tp_size = tp_group, tp_group.size() if tp_group is not None else tp_size
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        for number in range(num_gemms):
            weight = torch.empty(self.out_features, self.in_features, device=device, dtype=params_dtype)
            weight = torch.nn.Parameter(weight)
            if init_method is not None:
                with torch.no_grad():
                    init_method(weight)
            if parallel_mode is not None:
                _mark_parallel(weight, 0 if parallel_mode == "column" else 1)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, inp, m_splits, is_first_microbatch=None):
        assert not isinstance(inp, (list, tuple)), "GroupedLinear only accepts a single input tensor"
        assert len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        assert all(isinstance(rows, int) for rows in m_splits), "splits are numbers of the host"
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        return GroupedProduct.apply(inp, list(m_splits), self.fuse_wgrad_accumulation, is_first_microbatch, *weights)


class LayerNorm(torch.nn.LayerNorm): ...


class LayerNormMLP(TransformerEngineBaseModule): ...


class Fp8Padding(torch.nn.Module):
    def __init__(self, num_gemms, align_size=None):
        super().__init__()


class Fp8Unpadding(Fp8Padding): ...
