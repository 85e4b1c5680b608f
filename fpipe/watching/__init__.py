# SPDX-License-Identifier: Apache-2.0
"""The assumptions a pipeline makes about its surroundings when it is built, and checks that they still hold."""
