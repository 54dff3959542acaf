# SPDX-License-Identifier: Apache-2.0
"""The pipeline for programs of diffusers, and the model for lmms-eval."""
