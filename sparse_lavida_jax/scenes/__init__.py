# SPDX-License-Identifier: Apache-2.0
"""The built-in world: scenes of shapes."""
