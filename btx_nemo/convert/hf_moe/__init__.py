"""Our own Hugging Face model, `BtxMoeForCausalLM`: every router over every family, where no other is exact.

The files `*_btx_moe.py` need torch and transformers alone. A copy of them lies in each folder that is exported so, for
`trust_remote_code=True`; where btx_nemo is installed, `register_auto_classes` makes that unnecessary.
"""

from __future__ import annotations


def register_auto_classes() -> None:
    """Make transformers' AutoConfig, AutoModel and AutoModelForCausalLM know `btx_moe`; may be called again.

    From then on a folder is loaded with this package's code, and what it carries itself is not executed.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from btx_nemo.convert.hf_moe.configuration_btx_moe import BtxMoeConfig
    from btx_nemo.convert.hf_moe.modeling_btx_moe import BtxMoeForCausalLM, BtxMoeModel

    AutoConfig.register(BtxMoeConfig.model_type, BtxMoeConfig, exist_ok=True)
    for auto, model in ((AutoModel, BtxMoeModel), (AutoModelForCausalLM, BtxMoeForCausalLM)):
        auto.register(BtxMoeConfig, model, exist_ok=True)
