# SPDX-License-Identifier: Apache-2.0
"""What a step passes, draws and caches."""
