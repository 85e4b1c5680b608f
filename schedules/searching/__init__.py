# SPDX-License-Identifier: Apache-2.0
"""Search for the order of actions that takes the least time, for given costs, placement and memory."""
