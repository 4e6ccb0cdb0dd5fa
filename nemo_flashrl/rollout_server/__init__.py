"""Our side of a vLLM server, in vLLM's own environment: needs vLLM, torch and the configuration, nothing of NeMo.

serve.py          configuration -> server processes that answer, one process group
model_check.py    whether the model can be served here
worker.py         what vLLM's workers import
vllm_backend.py   a folder of weights, or tensors over the network -> the model that is serving
"""
