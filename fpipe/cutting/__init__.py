# SPDX-License-Identifier: Apache-2.0
"""Where to cut: how users speak of a model's modules, and which positions in its units that means."""
