# SPDX-License-Identifier: Apache-2.0
"""Front ends: from a model to units and values. `contract` is what all of them deliver."""
