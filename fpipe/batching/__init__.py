# SPDX-License-Identifier: Apache-2.0
"""Split batches into microbatches, weight these, and merge outputs."""
