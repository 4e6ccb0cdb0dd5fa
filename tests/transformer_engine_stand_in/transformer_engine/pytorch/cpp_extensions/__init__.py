general_gemm = cast_to_fp8 = None
