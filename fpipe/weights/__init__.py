# SPDX-License-Identifier: Apache-2.0
"""A process's own share of a model: read from files and state dicts, or made by an initializer."""
