# SPDX-License-Identifier: Apache-2.0
"""From the released PyTorch folder to a model folder, and back."""
