# SPDX-License-Identifier: Apache-2.0
"""Compiled programs: made side by side before they run, and kept on disk between processes.

`folder` says where programs are kept, `executables` are the kept files, `side_by_side` compiles
several programs at once, and `persistent_jit` is a `jax.jit` that does all of this.
"""
