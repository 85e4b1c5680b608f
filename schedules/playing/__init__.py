# SPDX-License-Identifier: Apache-2.0
"""Play all ranks of a schedule together, in time order."""
