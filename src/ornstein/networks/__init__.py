"""Networks in plain torch for both parametrisations: `UNet` for images, `MLP` for vectors.

Any module that maps (x, logsnr) to a tensor like x does as well.
"""

from ornstein.networks.mlp import MLP
from ornstein.networks.unet import UNet

__all__ = ["MLP", "UNet"]
