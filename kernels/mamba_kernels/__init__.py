"""Tensor operations of Mamba-1 and Mamba-2: torch references and Triton kernels.

One pair of files an operation; import a function from its own module, for example
`from mamba_kernels.causal_conv1d import causal_conv1d_fn`.
"""
