# SPDX-License-Identifier: Apache-2.0
"""Cut a model into stages: choose the positions where stages begin, and route values between the stages."""
