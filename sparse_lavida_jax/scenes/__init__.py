# SPDX-License-Identifier: Apache-2.0
"""The built-in worlds: scenes of shapes, and handwritten digits."""
