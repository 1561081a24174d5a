"""Tensor operations of Mamba-1 and Mamba-2: torch references and Triton kernels.

The functions keep the names, argument order and layouts of mamba_ssm and causal-conv1d, so that code
moves over by changing an import: `from mamba_kernels import mamba_chunk_scan_combined`. Each is imported
at first use from the module of its operation, which also holds its reference, `<name>_ref`.
Those that share their module's name, as `selective_state_update` does, are imported from there only.
"""

import importlib

_HOMES = {
    "LayerFormat": "packed_state",
    "PackedState": "packed_state",
    "advance_positions": "packed_state",
    "causal_conv1d_fn": "causal_conv1d",
    "causal_conv1d_ref": "causal_conv1d",
    "causal_conv1d_update": "causal_conv1d",
    "causal_conv1d_update_ref": "causal_conv1d",
    "causal_conv1d_varlen_states": "causal_conv1d_varlen",
    "causal_conv1d_varlen_states_ref": "causal_conv1d_varlen",
    "empty_packed_state": "packed_state",
    "mamba_chunk_scan_combined": "chunk_scan",
    "mamba_chunk_scan_combined_ref": "chunk_scan",
    "mamba_inner_fn": "mamba_inner",
    "mamba_inner_ref": "mamba_inner",
    "mamba_split_conv1d_scan_combined": "split_conv1d_scan",
    "rmsnorm_fn": "rmsnorm",
    "rmsnorm_ref": "rmsnorm",
    "selective_scan_fn": "selective_scan",
    "selective_scan_ref": "selective_scan",
    "use_backend": "backend",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"mamba_kernels.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
