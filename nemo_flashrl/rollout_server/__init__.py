"""Our side of a vLLM server, in vLLM's own environment: needs vLLM, torch and the configuration, nothing of NeMo.

serve.py          configuration -> server processes that answer, one process group
worker.py         what vLLM's workers import
file_transfer.py  a folder of weights -> the model that is serving
"""
