"""Our side of a vLLM server, in vLLM's own environment: needs vLLM, torch and the configuration, nothing of NeMo.

serve.py               configuration -> server processes that answer, one process group
worker.py              what vLLM's workers import
weight_transfer.py     a folder of weights, or tensors over the network -> the model that is serving
weight_group.py        the network between trainer and workers, from either end; the trainer imports it too
checkpoint_folder.py   what is in a folder of weights, and whether it fits; likewise
"""
