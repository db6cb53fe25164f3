"""flowrl: RL fine-tuning of diffusion and flow generative models.

Importing this package imports nothing heavy; torch, diffusers and transformers are imported by the
modules that use them.
"""

__version__ = "0.1.0"
