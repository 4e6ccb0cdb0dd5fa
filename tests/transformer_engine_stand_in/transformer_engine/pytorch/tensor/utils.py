replace_raw_data = cast_master_weights_to_fp8 = None
