parallel_cross_entropy = None
