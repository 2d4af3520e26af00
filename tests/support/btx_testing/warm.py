# ruff: noqa: F401
"""What commands and gloo ranks import, in one place: the processes of the tests fork from one that has imported this.

A fresh interpreter needs three seconds of processor time for it.
"""

from btx_nemo.megatron.platform import cpu_platform
from btx_nemo.startup import kept_imports

with kept_imports(), cpu_platform():
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer
    import torch._dynamo  # by the first step of an optimizer
    import torch.distributed.tensor

    import btx_nemo.convert.logits
    import btx_nemo.train.run
    import btx_nemo.train.setup
    import btx_nemo.train.step
    from btx_nemo.config.load import load

    load("train", "tiny_expert", [f"{name}=x" for name in ("domain", "init_from", "data.path", "out")])  # imports Hydra
