"""The module `dlojz.idr_torch`, under the name by which programs written for Jean Zay import it."""

import sys

from dlojz import idr_torch

sys.modules[__name__] = idr_torch
