# SPDX-License-Identifier: Apache-2.0
"""Converts the released PyTorch folder to a model folder, and back."""
