# SPDX-License-Identifier: Apache-2.0
"""Where to cut: how users refer to a model's modules, and the positions among its units that they mean."""
