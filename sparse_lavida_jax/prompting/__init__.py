# SPDX-License-Identifier: Apache-2.0
"""What the formats of prompts share: their protocol, texts with gaps, words, text tokenizers."""
