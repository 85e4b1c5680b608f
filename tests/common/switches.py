# SPDX-License-Identifier: Apache-2.0
"""A module that draws random numbers for some data only."""

from torch import nn

from tests.common.cases import WIDTH


class Switch(nn.Module):
    """Draws by `draw` for positive data only, which the capture does not see."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x):
        return self.draw(self.linear(x)) if x.sum() > 0 else self.linear(x)
