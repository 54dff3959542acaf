# SPDX-License-Identifier: Apache-2.0
"""What a sampling step passes through the model, draws and caches."""
