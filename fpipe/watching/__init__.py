# SPDX-License-Identifier: Apache-2.0
"""What a pipeline assumed about its surroundings when it was built, and whether that still holds."""
