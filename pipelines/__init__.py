"""Wrappers that present samplers as MDPs, and pipelines that diffusers lacks."""
