# SPDX-License-Identifier: Apache-2.0
"""ComfyUI nodes for a Sparse-LaViDa server; ComfyUI imports this folder."""

from .nodes import NODES

NODE_CLASS_MAPPINGS = {f"SparseLaViDa{node.__name__}": node for node in NODES}
NODE_DISPLAY_NAME_MAPPINGS = {
    f"SparseLaViDa{node.__name__}": f"Sparse-LaViDa {node.__name__}" for node in NODES
}
