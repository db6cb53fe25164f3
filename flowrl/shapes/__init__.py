"""The built-in text-to-image task: flat shapes on a plain canvas, with GenEval-style prompts.

Small enough for a laptop CPU and exactly verifiable. The pretrained models in ``assets/``, the
``scene`` reward and the quickstart recipes all speak of this one domain.
"""
