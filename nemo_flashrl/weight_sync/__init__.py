"""What trainer and server share of the weights on their way: folders, names, the network between them, the probe.

Needs torch and safetensors alone: it is imported in both environments.
"""
