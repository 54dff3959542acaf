# SPDX-License-Identifier: Apache-2.0
"""What is only so because the released LaViDa-O is."""
