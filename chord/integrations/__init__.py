"""chord inside serving frameworks, without a patch to any of them. Nothing here imports a framework before it asks.

`vllm` and `sglang` are plugins; `humming` is a stand-in for the package of that name, for those who ask for it.
"""
