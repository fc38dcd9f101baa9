"""Denoisers from elsewhere: `from_diffusers` makes any U-Net or transformer of `diffusers` a model.

The library itself is an extra, `pip install 'ornstein[diffusers]'`, and imported when it is used.
"""

from ornstein.adapters.denoiser import Diffusers
from ornstein.adapters.loading import from_diffusers

__all__ = ["Diffusers", "from_diffusers"]
