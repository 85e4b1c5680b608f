# SPDX-License-Identifier: Apache-2.0
"""Valid files and command lines, changed at random, and what may become of them."""
