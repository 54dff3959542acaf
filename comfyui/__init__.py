# SPDX-License-Identifier: Apache-2.0
"""Nodes of ComfyUI for a Sparse-LaViDa server: what ComfyUI reads when it loads this folder."""

from .nodes import NODES

NODE_CLASS_MAPPINGS = {f"SparseLaViDa{node.__name__}": node for node in NODES}
NODE_DISPLAY_NAME_MAPPINGS = {
    f"SparseLaViDa{node.__name__}": f"Sparse-LaViDa {node.__name__}" for node in NODES
}
