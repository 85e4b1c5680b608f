# SPDX-License-Identifier: Apache-2.0
"""Front ends, which turn a model into units and values. `contract` defines what they all deliver."""
