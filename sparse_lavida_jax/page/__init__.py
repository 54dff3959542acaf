# SPDX-License-Identifier: Apache-2.0
"""The web page on which a model is tried, and its figures."""
